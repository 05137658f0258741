"""Names of segments: nesting, patterns, and runs of consecutive siblings.

A segment is a module that may be recomputed as one. Its name is a dotted path, and a segment lies inside
another where the other's name and a dot begin its own. A *run* of consecutive siblings has a name too:
`encoder.stage0.block0-1` is `encoder.stage0.block0` and `encoder.stage0.block1` recomputed together.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

from torch import nn

from seg4k.errors import UserError


@runtime_checkable
class HasSegments(Protocol):
    """What a model offers to take part."""

    def segments(self) -> dict[str, nn.Module]:
        """All segments by name, nested ones too, in forward order."""


def segments_of(model: nn.Module) -> dict[str, nn.Module]:
    """The segments of a model, by name, in forward order.

    Raises:
        UserError: the model has no method `segments`.
    """
    method = getattr(model, "segments", None)
    if not callable(method):
        raise UserError(
            f"{type(model).__name__} has no method segments(), so activation checkpointing does not know its "
            "parts. Add one that returns {'encoder.stage0': module, ...}, all segments in forward order, or "
            "give that mapping: apply_activation_checkpointing(model, plan, segments={...})."
        )
    return dict(cast(HasSegments, model).segments())


class NamedSegments:
    """Stands in for the method `segments` of a model that has none; copies with the model and pickles."""

    def __init__(self, segments: Mapping[str, nn.Module]) -> None:
        self._segments = dict(segments)

    def __call__(self) -> dict[str, nn.Module]:
        """The segments by name, in forward order."""
        return dict(self._segments)


def name_segments(model: nn.Module, segments: Mapping[str, nn.Module]) -> None:
    """Give somebody's own model the method `segments()`.

    Names like those of `seg4k.models.ViTUNet` (`encoder.stage0`, `encoder.stage0.block0`, `neck.stride8`,
    `decoder.block0`) make the modes work; a plan may use any.

    Args:
        model: any. Its class is left as it is.
        segments: name to a module of the model that its forward calls, in forward order.

    Raises:
        UserError: a module that is not in the model, that is never called, or that is named twice.
    """
    inside = {id(module): name for name, module in model.named_modules()}
    named: dict[int, str] = {}
    for name, module in segments.items():
        where = f"activation_checkpointing: segment {name}"
        if id(module) not in inside:
            raise UserError(f"{where} is no module of this {type(model).__name__}: take it from the model")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and "forward" not in type(module).__dict__:
            kind = type(module).__name__
            raise UserError(
                f"{where} is a {kind} ({inside[id(module)]}), which no model calls: name its members instead"
            )
        if id(module) in named:
            raise UserError(f"{where} is the same module as {named[id(module)]}: leave one of them out")
        named[id(module)] = name
    model.__dict__["segments"] = NamedSegments(segments)


_RUN = re.compile(r"(?P<stem>.*\D)(?P<first>\d+)-(?P<last>\d+)")


def members(name: str) -> list[str]:
    """The segments that a name stands for: itself, or the siblings of a run.

    `encoder.stage0.block0-2` gives block0, block1 and block2.
    """
    run = _RUN.fullmatch(name)
    if run is None:
        return [name]
    first, last = int(run["first"]), int(run["last"])
    return [f"{run['stem']}{index}" for index in range(first, last + 1)]


def is_inside(name: str, other: str) -> bool:
    """Whether the segment `name` lies inside the segment or run `other` (and is not one of its members)."""
    return any(name.startswith(f"{member}.") for member in members(other))


def group_runs(names: Sequence[str], size: int) -> list[str]:
    """Join consecutive siblings, `size` at a time; the last run of a parent may be shorter.

    `group_runs(["a.block0", "a.block1", "a.block2"], 2)` gives `["a.block0-1", "a.block2"]`.
    """
    grouped: list[str] = []
    run: list[tuple[str, int]] = []

    def close() -> None:
        if run:
            (stem, first), (_, last) = run[0], run[-1]
            grouped.append(f"{stem}{first}" if first == last else f"{stem}{first}-{last}")
            run.clear()

    for name in names:
        match = re.fullmatch(r"(.*\D)(\d+)", name)
        if match is None:
            close()
            grouped.append(name)
            continue
        stem, index = match[1], int(match[2])
        if run and (run[-1] != (stem, index - 1) or len(run) == size):
            close()
        run.append((stem, index))
    close()
    return grouped


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches; `*` and `?` do not cross a dot.

    `encoder.stage*` matches `encoder.stage0` and not `encoder.stage0.block0`.
    """
    parts = re.split(r"([*?])", pattern)
    compiled = "".join({"*": "[^.]*", "?": "[^.]"}.get(part, re.escape(part)) for part in parts)
    return [name for name in names if re.fullmatch(compiled, name)]


def resolve(pattern: str, names: Sequence[str]) -> list[str]:
    """The segments or the run that a name or pattern of an explicit plan means.

    Raises:
        UserError: it matches nothing; the message lists the valid names, close ones first.
    """
    if found := matching(pattern, names):
        return found
    siblings = members(pattern)
    if len(siblings) > 1 and all(sibling in names for sibling in siblings):
        return [pattern]
    raise unknown_segment(pattern, names)


def unknown_segment(name: str, names: Sequence[str]) -> UserError:
    """The error for a name that is no segment and a pattern that matches none."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    rest = [other for other in names if other not in close]
    what = "matches no segment" if re.search(r"[*?]", name) else "is not a segment"
    return UserError(
        f"activation_checkpointing: {name!r} {what} of this model.{hint} Its segments are: "
        + ", ".join([*close, *rest])
        + ". A star stands for any part of a name between two dots; a run of siblings is written block0-1."
    )
