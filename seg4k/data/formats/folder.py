"""A plain folder: images and masks by split, or in one folder each with lists, and a class file."""

from collections.abc import Sequence
from pathlib import Path

from seg4k.data.formats.base import MASK_SUFFIXES, Listing, by_name, from_list
from seg4k.data.images import SUFFIXES
from seg4k.data.labels import Labelling
from seg4k.errors import UserError

LAYOUT = (
    "images/train, images/val, masks/train, masks/val (or images, masks, train.txt, val.txt) and classes.json"
)
WINDOWED = False
CHANNELS = None
CLASS_FILES = ("classes.json", "classes.csv", "classes.txt")


def labelling(root: Path) -> Labelling:
    """From the first of `CLASS_FILES` that exists."""
    found = [root / name for name in CLASS_FILES if (root / name).exists()]
    return Labelling.from_file(found[0] if found else root / CLASS_FILES[0])


def splits(root: Path) -> list[str]:
    """Those with a folder of images, where train or val has one; or else those with a list."""
    folders = [path.name for path in sorted((root / "images").glob("*")) if path.is_dir()]
    if {"train", "val"} & set(folders):
        return folders
    return [path.stem for path in sorted(root.glob("*.txt")) if _is_list(root, path)] or folders


def listing(root: Path, split: str, suffixes: Sequence[str] = SUFFIXES) -> Listing:
    """images/SPLIT and masks/SPLIT; or, where there is SPLIT.txt, the images that it names.

    Names in a list are paths below images/, and the masks lie likewise below masks/.
    """
    masks = [suffix for suffix in suffixes if suffix in MASK_SUFFIXES]
    if (root / f"{split}.txt").is_file() and not (root / "images" / split).is_dir():
        return from_list(
            root / f"{split}.txt",
            _below(root / "images", suffixes),
            _below(root / "masks", masks),
            lambda name: root / "masks" / f"{name}{masks[0]}",
        )
    return Listing(
        by_name(root / "images" / split, LAYOUT, suffixes),
        by_name(root / "masks" / split, LAYOUT, masks),
        lambda name: root / "masks" / split / f"{name}{masks[0]}",
    )


def _is_list(root: Path, path: Path) -> bool:
    """Whether a file is the list of a split rather than a class file or notes: it names an image."""
    if path.stem in ("train", "val"):
        return True
    try:
        return path.name not in CLASS_FILES and bool(listing(root, path.stem).images)
    except UserError:
        return False


def _below(folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist; a data folder holds {LAYOUT}.")
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in suffixes and not path.name.startswith("."):
            name = path.relative_to(folder).with_suffix("").as_posix()
            if name in found:
                raise UserError(f"{found[name]} and {path} have the same name; remove or rename one of them.")
            found[name] = path
    return found
