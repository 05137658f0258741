"""From the plain values of the config group `data` to a datamodule."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seg4k.errors import UserError

if TYPE_CHECKING:
    from seg4k.data.datamodule import SegmentationDataModule, Source

_KEYS = (
    "name",
    "root",
    "image_size",
    "val_size",
    "samples_per_epoch",
    "rare_crop_share",
    "rare_classes",
    "augment",
    "num_workers",
)
_MORE_KEYS: dict[str, tuple[str, ...]] = {"blue_marble": (), "folder": ("in_channels",)}


def build_datamodule(
    config: Mapping[str, Any], *, seed: int, batch_size: int, accumulate: int = 1
) -> "SegmentationDataModule":
    """Check the config group `data` (keys as in conf/data/*.yaml) and make its datamodule.

    The class file of a folder is read at once; images are looked at in `setup`.

    Args:
        config: plain values; `name` and `image_size` must be there.
        seed: seed of the run.
        batch_size: samples per step on one process.
        accumulate: steps of one optimizer step; an epoch is cut to a whole number of optimizer steps.

    Raises:
        UserError: for an unknown key, a value out of its range, or a class file that is missing or wrong.
    """
    from seg4k.data.datamodule import SegmentationDataModule, Settings
    from seg4k.data.transforms import Augment

    name = config.get("name")
    if name not in _MORE_KEYS:
        raise UserError(f"data.name is {name!r}{_hint(str(name), tuple(_MORE_KEYS))}")
    for key in config:
        known = _KEYS + _MORE_KEYS[name]
        if key not in known:
            raise UserError(f"Unknown key data.{key} for data={name}{_hint(key, known)}")
    image_size = _size("image_size", config.get("image_size"))
    if image_size is None:
        raise UserError("data.image_size is not set; give the size of the training crops, [height, width].")
    if batch_size < 1 or accumulate < 1:
        raise UserError(f"The batch size is {batch_size} with {accumulate} steps; both are 1 or more.")
    share = config.get("rare_crop_share", 0.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise UserError(f"data.rare_crop_share is {share!r}; give a number from 0 to 1.")
    rare = _names("rare_classes", config.get("rare_classes"))
    if share > 0 and not rare:
        raise UserError(
            "data.rare_crop_share needs classes: set data.rare_classes=[NAME, ...], or the share to 0."
        )
    settings = Settings(
        image_size=image_size,
        val_size=_size("val_size", config.get("val_size")),
        samples_per_epoch=_whole("samples_per_epoch", config.get("samples_per_epoch"), least=1),
        rare_crop_share=float(share),
        rare_classes=rare,
        augment=Augment.from_config(config.get("augment")),
        num_workers=_whole("num_workers", config.get("num_workers", 0), least=0),
    )
    source = _source(name, config)
    for class_name in rare:
        source.class_table.index(class_name)
    return SegmentationDataModule(source, settings, seed=seed, batch_size=batch_size, accumulate=accumulate)


def _source(name: str, config: Mapping[str, Any]) -> "Source":
    from seg4k.data.datamodule import BlueMarbleSource, FolderSource

    root = config.get("root")
    if name == "blue_marble":
        return BlueMarbleSource(Path(root or "data/blue_marble"))
    channels = _whole("in_channels", config.get("in_channels"), least=1)
    return FolderSource(Path(root) if root else None, channels)


def _size(key: str, value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    good = isinstance(value, (list, tuple)) and len(value) == 2
    if not good or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value):  # type: ignore[attr-defined]
        raise UserError(f"data.{key} is {value!r}; give two whole numbers, [height, width].")
    return value[0], value[1]  # type: ignore[index]


def _whole(key: str, value: object, *, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"data.{key} is {value!r}; give a whole number from {least} up, or null.")
    return value


def _names(key: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise UserError(f"data.{key} is {value!r}; give a list of class names.")
    return tuple(value)


def _hint(given: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(given, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else f"; it can be: {', '.join(known)}."
