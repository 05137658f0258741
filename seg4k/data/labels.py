"""What the values in masks mean: label ids or colours to classes, merged or ignored."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import cv2
import numpy as np
from numpy.typing import NDArray

from seg4k.data.classes import ClassTable, read_class_file
from seg4k.errors import UserError

OTHERS = "others"
_ALL_COLOURS = 2**24


@dataclass(frozen=True)
class Labelling:
    """The classes, and which values in the masks are which.

    Attributes:
        table: names, colours and the ignored label.
        ids: value in a mask -> label; the ignored label for values that count for nothing. None where masks
            hold the labels themselves. A colour (r, g, b) is the value 65536 r + 256 g + b.
        others_ignored: whether values without a class are ignored rather than a mistake.
        colours: whether masks are colour images.
    """

    table: ClassTable
    ids: Mapping[int, int] | None = None
    others_ignored: bool = False
    colours: bool = False
    where: str = field(default="the class file", compare=False)

    @classmethod
    def from_file(cls, path: Path | str) -> Self:
        """Read a class file, see `from_dict` and `ClassTable.from_file`."""
        return cls.from_dict(read_class_file(path), str(path))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "the class table") -> Self:
        """Make it from the form of `ClassTable.from_dict` with these keys more.

        `ids` of a class: the values in the masks that it has, one or a list (merged); without it, its place
        in the list. `masks: "colours"`: masks are colour images, and a class has the pixels of its `colour`,
        or of each of its `mask_colours`. `ignored`: a list of ids (or colours) that count for nothing, or
        "others" for all that no class has; beside them `ignore_index` itself is always ignored.

        Raises:
            UserError: naming the file and the class, where two classes have the same value, or a key or value
                is wrong.
        """
        colours = value.get("masks", "labels")
        if colours not in ("labels", "colours"):
            raise UserError(f'{where}: "masks" is {colours!r}; give "labels" or "colours".')
        entries = value.get("classes")
        plain = {key: entry for key, entry in value.items() if key not in ("masks", "ignored")}
        if isinstance(entries, (list, tuple)):
            plain["classes"] = [_without(_coloured(entry), ("ids", "mask_colours")) for entry in entries]
        table = ClassTable.from_dict(plain, where)
        assert isinstance(entries, (list, tuple))
        ignored = value.get("ignored", [])
        listed = [entry if isinstance(entry, Mapping) else {} for entry in entries]
        masks_are_colours = colours == "colours"
        if not masks_are_colours and not ignored and not any("ids" in entry for entry in listed):
            return cls(table, where=where)
        ids: dict[int, int] = {}
        for label, entry in enumerate(listed):
            for number in _values(entry, label, table, masks_are_colours, where):
                if number in ids:
                    raise UserError(
                        f"{where}: {_say(number, masks_are_colours)} belongs to class "
                        f"{table.names[ids[number]]!r} and to class {table.names[label]!r}; give it to one."
                    )
                ids[number] = label
        if ignored != OTHERS:
            for number in _list_of_values(ignored, masks_are_colours, f'{where}: "ignored"'):
                if ids.setdefault(number, table.ignore_index) != table.ignore_index:
                    raise UserError(
                        f"{where}: {_say(number, masks_are_colours)} is ignored, but belongs to class "
                        f"{table.names[ids[number]]!r}; remove one of the two."
                    )
        if not masks_are_colours:
            ids.setdefault(table.ignore_index, table.ignore_index)
        return cls(table, ids, ignored == OTHERS, masks_are_colours, where)

    @property
    def digest(self) -> str:
        """Changes whenever a mask would be read differently."""
        ids = None if self.ids is None else sorted(self.ids.items())
        told = [ids, self.others_ignored, self.colours, len(self.table), self.table.ignore_index]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def apply(self, values: NDArray[Any], path: Path) -> NDArray[Any]:
        """Labels (H, W) of the values of a mask (H, W), uint8 or uint16, or uint32 for colours.

        The result is uint8 where every label and the ignored one fit; a mask without `ids` keeps its type.

        Raises:
            UserError: naming the mask `path` and the values, where some have no class and are not ignored.
        """
        if self.ids is None:
            if int(values.max()) >= len(self.table):
                self._refuse([x for x in distinct(values) if self._unknown(x)], path)
            return values.astype(self.dtype(values.dtype), copy=False)
        lookup = self._lookup
        small = values.dtype == np.uint8
        labels = np.asarray(cv2.LUT(values, lookup[:256])) if small else lookup[values]
        if not self.others_ignored and (labels == self._spare).any():
            self._refuse(distinct(values[labels == self._spare]), path)
        return labels

    def dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """The type of the labels of a mask whose values are stored in the type `stored`."""
        if self.ids is not None:
            return np.dtype(self._lookup.dtype)
        return np.dtype(np.uint16) if self.table.ignore_index > 255 else stored

    def _unknown(self, value: int) -> bool:
        return value >= len(self.table) and value != self.table.ignore_index

    def unknown(self, values: list[int]) -> list[int]:
        """Those of the values that have no class and are not ignored."""
        if self.ids is None:
            return [value for value in values if self._unknown(value)]
        return [] if self.others_ignored else [value for value in values if value not in self.ids]

    def _refuse(self, wrong: list[int], path: Path) -> None:
        if wrong:
            raise UserError(self.complaint(wrong, path))

    def complaint(self, wrong: list[int], path: Path) -> str:
        """The message for a mask that holds values without a class."""
        shown = ", ".join(_say(value, self.colours, "") for value in wrong[:5])
        more = ", ..." if len(wrong) > 5 else ""
        if self.ids is not None:
            what, it = ("colour", "the colour") if self.colours else ("label", "it")
            return (
                f"The mask {path} holds the {what} {shown}{more}, which no class has; correct the mask, or "
                f'give {it} to a class or to "ignored" in {self.where}.'
            )
        return (
            f"The mask {path} holds the label {shown}{more}, but the classes are 0 to {len(self.table) - 1} "
            f"and {self.table.ignore_index} is ignored; correct the mask, or the class file."
        )

    @cached_property
    def _spare(self) -> int:
        """A label that stands for values without a class."""
        first = len(self.table)
        return first + 1 if first == self.table.ignore_index else first

    @cached_property
    def _lookup(self) -> NDArray[Any]:
        """Label of each value."""
        assert self.ids is not None
        small = max(self.table.ignore_index, self._spare) < 256
        other = self.table.ignore_index if self.others_ignored else self._spare
        # Colours need 16 MiB; few of them are ever looked up, so that they stay in the processor's cache.
        lookup = np.full(_ALL_COLOURS if self.colours else 65536, other, np.uint8 if small else np.uint16)
        lookup[list(self.ids)] = list(self.ids.values())
        return lookup

    def __getstate__(self) -> dict[str, Any]:
        # A worker makes the tables itself.
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}


def distinct(values: NDArray[Any]) -> list[int]:
    """The values that an array of any shape holds, in order."""
    if values.dtype == np.uint8 or values.dtype == np.uint16:
        return [int(value) for value in np.flatnonzero(histogram(values))]
    return [int(value) for value in np.unique(values)]


def histogram(values: NDArray[Any]) -> NDArray[np.int64]:
    """How often each value occurs: (256,) of an array of uint8, (65536,) of uint16."""
    bins = 256 if values.dtype == np.uint8 else 65536
    # A tenth of the time of numpy.bincount, which first widens to 64 bits. Its counts are floats, which are
    # exact up to 2^24: so in pieces.
    flat = values.reshape(-1)
    counts = np.zeros(bins, np.int64)
    for start in range(0, flat.size, 2**24):
        part = cv2.calcHist([flat[start : start + 2**24]], [0], None, [bins], [0, bins])
        counts += np.asarray(part).reshape(-1).astype(np.int64)
    return counts


def _coloured(entry: Any) -> Any:  # noqa: ANN401 - as it stands in the file
    """The entry of a class with the first of its colours in the masks as its own, where it has none."""
    if isinstance(entry, Mapping) and not entry.get("colour"):
        found = entry.get("mask_colours")
        # Anything else is told of with the class's name, where the values are read.
        if (
            isinstance(found, (list, tuple))
            and found
            and isinstance(found[0], (list, tuple))
            and len(found[0]) == 3
        ):
            return {**entry, "colour": found[0]}
    return entry


def _without(entry: object, keys: tuple[str, ...]) -> object:
    return {k: v for k, v in entry.items() if k not in keys} if isinstance(entry, Mapping) else entry


def _values(entry: Mapping[str, Any], label: int, table: ClassTable, colours: bool, where: str) -> list[int]:
    """The values of one class."""
    where = f"{where}: class {table.names[label]!r}"
    if not colours:
        return _list_of_values(entry.get("ids", label), False, f'{where}: "ids"')
    if "ids" in entry:
        raise UserError(f'{where} has "ids", but the masks are colours; give "mask_colours" instead.')
    if "colour" not in entry and "mask_colours" not in entry:
        raise UserError(
            f'{where} has no "colour", which says where it is in masks that are colours; give it.'
        )
    return _list_of_values(entry.get("mask_colours", [list(table.colours[label])]), True, where)


def _list_of_values(given: object, colours: bool, where: str) -> list[int]:
    listed: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    if colours:
        if not all(
            isinstance(c, (list, tuple)) and len(c) == 3 and all(_is_int(v, 255) for v in c) for c in listed
        ):
            raise UserError(f"{where}: {given!r} is no list of colours; give [[red, green, blue], ...].")
        return [(c[0] << 16) | (c[1] << 8) | c[2] for c in listed]
    if not all(_is_int(value, 65535) for value in listed):
        raise UserError(f"{where} is {given!r}; give label ids, whole numbers from 0 to 65535.")
    return [int(value) for value in listed]


def _is_int(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _say(value: int, colours: bool, word: str = "label ") -> str:
    if not colours:
        return f"{word}{value}"
    return f"({value >> 16}, {value >> 8 & 255}, {value & 255})"
