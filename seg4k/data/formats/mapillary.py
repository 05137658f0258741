"""Mapillary Vistas (Neuhold et al., ICCV 2017), versions 1.2 and 2.0; classes as its own config file says."""

import json
from pathlib import Path
from typing import Any

from seg4k.data.formats.base import MASK_SUFFIXES, Listing, by_name
from seg4k.data.labels import Labelling
from seg4k.errors import UserError

LAYOUT = (
    "config_v2.0.json and {training,validation}/images/*.jpg with {training,validation}/v2.0/labels/*.png, "
    "or those of v1.2"
)
WINDOWED = False
CHANNELS = 3
_FOLDERS = {"train": "training", "val": "validation", "test": "testing"}
# The newer taxonomy first; the release of 2017 has its labels straight below the split.
_VERSIONS = (
    ("config_v2.0.json", "v2.0/labels"),
    ("config_v1.2.json", "v1.2/labels"),
    ("config.json", "labels"),
)


def labelling(root: Path) -> Labelling:
    """The labels of the config file in its order, which are the values in the masks.

    Labels that the file does not evaluate are ignored.

    Raises:
        UserError: where the file is missing or is not of its form.
    """
    path = root / _version(root)[0]
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["labels"]
        names = [str(entry["name"]) for entry in entries]
        readable = [str(entry.get("readable", entry["name"])) for entry in entries]
        colours = [[int(value) for value in entry["color"]] for entry in entries]
        used = [bool(entry.get("evaluate", True)) for entry in entries]
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; a data folder holds {LAYOUT}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'{path} is no list of "labels" with "name" and "color" ({error!r}); unpack the data set again.'
        ) from None
    classes: list[dict[str, Any]] = []
    for label, name in enumerate(names):
        if used[label]:
            # Readable names are short, but not all different.
            shown = readable[label] if readable.count(readable[label]) == 1 else name
            classes.append({"name": shown, "colour": colours[label], "ids": label})
    ignored = [label for label in range(len(names)) if not used[label]]
    return Labelling.from_dict({"classes": classes, "ignored": ignored}, str(path))


def splits(root: Path) -> list[str]:
    """Those with a folder of images."""
    return [split for split, folder in _FOLDERS.items() if (root / folder / "images").is_dir()]


def listing(root: Path, split: str) -> Listing:
    """Images and labels of the version whose config file is there."""
    folder = root / _FOLDERS.get(split, split)
    masks = folder / _version(root)[1]
    if not masks.is_dir() and (folder / "labels").is_dir():
        masks = folder / "labels"
    return Listing(
        by_name(folder / "images", LAYOUT),
        by_name(masks, LAYOUT, MASK_SUFFIXES),
        lambda name: masks / f"{name}.png",
    )


def _version(root: Path) -> tuple[str, str]:
    return next((version for version in _VERSIONS if (root / version[0]).is_file()), _VERSIONS[0])
