"""The config group `data`: its keys, and their values checked."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seg4k.data.formats import NAMES
from seg4k.data.transforms import Augment
from seg4k.errors import UserError

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
    "on_error",
)
_CACHES = ("none", "ram", "disk")
_ON_ERROR = ("stop", "skip")
_FORMAT_KEYS = ("in_channels", "class_file", "cache", "cache_bytes", "cache_dir")
_MORE_KEYS: dict[str, tuple[str, ...]] = {"blue_marble": (), **dict.fromkeys(NAMES, _FORMAT_KEYS)}


@dataclass(frozen=True)
class Settings:
    """What the datamodule is told beside its source; see conf/data/*.yaml for each."""

    image_size: tuple[int, int]
    val_size: tuple[int, int] | None = None
    samples_per_epoch: int | None = None
    rare_crop_share: float = 0.0
    rare_classes: tuple[str, ...] = ()
    augment: Augment = field(default_factory=Augment)
    num_workers: int | None = 0
    skip_unreadable: bool = False


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Check the keys of the config group `data`, and those values that concern training.

    Raises:
        UserError: for an unknown key or a value out of its range.
    """
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
    share = config.get("rare_crop_share", 0.0)
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise UserError(f"data.rare_crop_share is {share!r}; give a number from 0 to 1.")
    rare = _names("rare_classes", config.get("rare_classes"))
    if share > 0 and not rare:
        raise UserError(
            "data.rare_crop_share needs classes: set data.rare_classes=[NAME, ...], or the share to 0."
        )
    cache = config.get("cache", "none")
    if cache not in _CACHES:
        raise UserError(f"data.cache is {cache!r}; choose none, ram or disk.")
    if name == "geotiff" and cache != "none":
        raise UserError(
            f"data.cache={cache} has no effect with data=geotiff: windows are read from the file, and the "
            "system keeps in memory what was read; set data.cache=none."
        )
    on_error = config.get("on_error", "stop")
    if on_error not in _ON_ERROR:
        raise UserError(f"data.on_error is {on_error!r}; choose {' or '.join(_ON_ERROR)}.")
    return Settings(
        image_size=image_size,
        val_size=_size("val_size", config.get("val_size")),
        samples_per_epoch=whole_number("samples_per_epoch", config.get("samples_per_epoch"), least=1),
        rare_crop_share=float(share),
        rare_classes=rare,
        augment=Augment.from_config(config.get("augment")),
        num_workers=whole_number("num_workers", config.get("num_workers", 0), least=0),
        skip_unreadable=on_error == "skip",
    )


def path_or_none(key: str, value: object) -> Path | None:
    """A path, or None where it is not set."""
    if value is None or value == "":
        return None
    return as_path(f"data.{key}", value)


def as_path(key: str, value: object) -> Path:
    """A path that must be set.

    Raises:
        UserError: where it is not, or was read as something else than text.
    """
    if not isinstance(value, (str, Path)) or not str(value):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        hint = ", one that looks like a number with ./ before it" if number else ""
        raise UserError(f"{key} is {value!r}; give a path{hint}.")
    return Path(value)


def _size(key: str, value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    good = isinstance(value, (list, tuple)) and len(value) == 2
    if not good or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value):  # type: ignore[attr-defined]
        raise UserError(f"data.{key} is {value!r}; give two whole numbers, [height, width].")
    return value[0], value[1]  # type: ignore[index]


def whole_number(key: str, value: object, *, least: int) -> int | None:
    """A whole number from `least` up, or None for null."""
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
