"""The classes of a task: their names, their colours and the label that is ignored."""

import colorsys
import difflib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from seg4k.errors import UserError

Colour = tuple[int, int, int]

_LARGEST_LABEL = 65535
_JSON_FORM = '{"classes": [{"name": "road", "colour": [128, 64, 128]}, ...], "ignore_index": 255}'
_CSV_FORM = "one class a line: name, or name,red,green,blue"


@dataclass(frozen=True)
class ClassTable:
    """Names and colours of the classes; the label of a class is its place in the list.

    Attributes:
        names: one name per class, all different.
        colours: one (red, green, blue) per class, each 0 to 255.
        ignore_index: the label that counts for nothing; no class has it.

    Raises:
        UserError: for an empty table, a name given twice, a colour out of range, or an `ignore_index` that is
            the label of a class or that no 16-bit mask can hold.
    """

    names: tuple[str, ...]
    colours: tuple[Colour, ...]
    ignore_index: int = 255

    def __post_init__(self) -> None:
        if not self.names:
            raise UserError(f"The class table is empty; give at least one class, as in {_JSON_FORM}.")
        if len(self.colours) != len(self.names):
            raise UserError(
                f"The class table has {len(self.names)} names and {len(self.colours)} colours; "
                "give each class one colour, or none of them."
            )
        for label, name in enumerate(self.names):
            if not isinstance(name, str) or not name.strip():
                raise UserError(f"Class {label} has the name {name!r}; give it a name in words.")
        twice = sorted(name for name, count in Counter(self.names).items() if count > 1)
        if twice:
            raise UserError(
                f"Class name {twice[0]!r} is given more than once; each class needs its own name."
            )
        for name, colour in zip(self.names, self.colours, strict=True):
            if len(colour) != 3 or not all(_is_int(value) and 0 <= value <= 255 for value in colour):
                raise UserError(
                    f"Class {name!r} has the colour {list(colour)}; give [red, green, blue], each 0 to 255."
                )
        if not _is_int(self.ignore_index) or not 0 <= self.ignore_index <= _LARGEST_LABEL:
            raise UserError(
                f"ignore_index is {self.ignore_index!r}; give a whole number from 0 to {_LARGEST_LABEL}."
            )
        if self.ignore_index < len(self.names):
            raise UserError(
                f"ignore_index {self.ignore_index} is the label of class {self.names[self.ignore_index]!r}; "
                f"choose one from {max(255, len(self.names))} up (65535 for more than 255 classes)."
            )

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def from_names(
        cls, names: Sequence[str], colours: Sequence[Sequence[int]] | None = None, ignore_index: int = 255
    ) -> Self:
        """Make a table from names; without `colours` each class gets one of evenly spread hues."""
        if colours is None:
            colours = [_spread_colour(label) for label in range(len(names))]
        return cls(tuple(names), tuple(_triple(colour) for colour in colours), ignore_index)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any], where: str = "the class table") -> Self:
        """Make a table from `{"classes": [{"name": "", "colour": [r, g, b]}, ...], "ignore_index": 255}`.

        A class may be only its name (a string); colours are given for all classes or for none. `where` names
        the source in error messages.
        """
        unknown = sorted(set(value) - {"classes", "ignore_index"})
        if unknown or not isinstance(value.get("classes"), (list, tuple)):
            fault = f"unknown key {unknown[0]!r}" if unknown else 'no list under the key "classes"'
            raise UserError(f"{where}: {fault}; the form is {_JSON_FORM}.")
        names: list[str] = []
        colours: list[Sequence[int]] = []
        for entry in value["classes"]:
            if isinstance(entry, str):
                names.append(entry)
            elif isinstance(entry, Mapping) and "name" in entry and set(entry) <= {"name", "colour"}:
                names.append(entry["name"])
                if entry.get("colour") is not None:
                    colours.append(entry["colour"])
            else:
                raise UserError(f"{where}: {entry!r} is not a class; the form is {_JSON_FORM}.")
        try:
            return cls.from_names(names, colours or None, value.get("ignore_index", 255))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    @classmethod
    def from_file(cls, path: Path | str) -> Self:
        """Read a class file: `.json` as in `from_dict`, or `.csv`/`.txt` with one class a line.

        A line is `name` or `name,red,green,blue`; empty lines and lines that begin with `#` are skipped.

        Raises:
            UserError: where the file is missing or is not of this form.
        """
        return cls.from_dict(read_class_file(path), str(path))

    def to_dict(self) -> dict[str, Any]:
        """The table as plain lists, numbers and strings; `from_dict` reads it back."""
        pairs = zip(self.names, self.colours, strict=True)
        return {
            "classes": [{"name": name, "colour": list(colour)} for name, colour in pairs],
            "ignore_index": self.ignore_index,
        }

    def index(self, name: str) -> int:
        """The label of the class called `name`.

        Raises:
            UserError: where there is no such class; the message names close ones.
        """
        if name in self.names:
            return self.names.index(name)
        close = difflib.get_close_matches(str(name), self.names, n=3)
        hint = (
            f"did you mean {' or '.join(map(repr, close))}?"
            if close
            else f"the classes are {list(self.names)}."
        )
        raise UserError(f"There is no class {name!r}; {hint}")

    def palette(self, ignored: Colour = (0, 0, 0)) -> NDArray[np.uint8]:
        """The lookup table from label to colour, (65536 or 256, 3); other labels get the colour `ignored`."""
        table = np.empty((256 if self.ignore_index < 256 else _LARGEST_LABEL + 1, 3), np.uint8)
        table[:] = ignored
        table[: len(self)] = self.colours
        return table

    def to_rgb(self, labels: NDArray[np.integer[Any]], ignored: Colour = (0, 0, 0)) -> NDArray[np.uint8]:
        """Paint labels (H, W) in the class colours, (H, W, 3) RGB; other labels in the colour `ignored`."""
        return np.asarray(self.palette(ignored)[labels])


def read_class_file(path: Path | str) -> dict[str, Any]:
    """The content of a class file as `{"classes": [...], ...}`, its entries not yet checked.

    Raises:
        UserError: where the file is missing, or is neither JSON nor lines of classes.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"The class file {path} does not exist; write it as {_JSON_FORM}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The class file {path} cannot be read ({error}); write it as UTF-8 text.") from None
    if path.suffix.lower() in {".csv", ".txt"}:
        return {"classes": _csv_classes(text, path)}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"The class file {path} is not JSON ({error}); the form is {_JSON_FORM}.") from None
    if isinstance(value, list):
        value = {"classes": value}
    if not isinstance(value, dict):
        raise UserError(f"The class file {path} holds no classes; the form is {_JSON_FORM}.")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _triple(colour: Sequence[int]) -> Colour:
    values = tuple(colour) if isinstance(colour, (list, tuple)) else (colour,)
    return values  # the table itself checks length and range


def _spread_colour(label: int) -> Colour:
    # Steps of the golden ratio keep any first N hues far apart; alternating brightness helps neighbours.
    red, green, blue = colorsys.hsv_to_rgb(0.6 + label * 0.618034, 0.75, 0.95 if label % 2 == 0 else 0.7)
    return round(red * 255), round(green * 255), round(blue * 255)


def _csv_classes(text: str, path: Path) -> list[dict[str, Any]]:
    classes: list[dict[str, Any]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, *rest = (cell.strip() for cell in line.split(","))
        if not rest:
            classes.append({"name": name})
            continue
        try:
            colour = [int(cell) for cell in rest]
        except ValueError:
            raise UserError(
                f"{path}, line {number}: {line.strip()!r} is no class; write {_CSV_FORM}."
            ) from None
        classes.append({"name": name, "colour": colour})
    return classes
