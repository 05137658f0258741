"""Which points of a sweep are still to be run, so that an interrupted sweep goes on where it stopped."""

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seg4k.errors import UserError
from seg4k.studies.collect import Run, collect_runs

# Overrides that say how a sweep is run, not what is run: a resumed sweep has them and the first one has not.
_ABOUT_THE_SWEEP = ("hydra.", "hydra/", "sweep.")
_ABOUT_THE_START = "resume"


def point_key(overrides: Iterable[str]) -> tuple[str, ...]:
    """The overrides of one point in a form that can be compared: sorted, the last of a repeated key counting.

    Overrides of `hydra.*`, `hydra/*`, `sweep.*` and `resume` are left out: they do not change what a run
    computes.
    """
    last: dict[str, str] = {}
    for override in overrides:
        name = override.strip().partition("=")[0]
        bare = name.lstrip("+~")
        if bare and bare != _ABOUT_THE_START and not bare.startswith(_ABOUT_THE_SWEEP):
            last[name] = override.strip()
    return tuple(sorted(last.values()))


def run_overrides(run: Run) -> list[str] | None:
    """The overrides that a run was started with, None where nothing tells.

    Looked for in the card's optional `overrides` list, then in Hydra's `.hydra/overrides.yaml`, then in the
    card's `command` (unless that is the command of a whole sweep, with `-m` or `--multirun`).
    """
    noted = run.card.get("overrides")
    if isinstance(noted, Sequence) and not isinstance(noted, str):
        return [str(item) for item in noted]
    record = run.directory / ".hydra" / "overrides.yaml"
    if record.is_file():
        return _read_overrides(record)
    command = run.card.get("command")
    if not isinstance(command, str):
        return None
    try:
        words = shlex.split(command)
    except ValueError:  # an open quote
        return None
    if "-m" in words or "--multirun" in words:
        return None
    return [word for word in words if "=" in word and not word.startswith("-")]


def settled_points(directory: Path | str, statuses: Collection[str] = ("completed",)) -> set[tuple[str, ...]]:
    """Keys (see `point_key`) of all points that have a card with one of `statuses` below `directory`.

    A directory that does not exist, or in which no run has ended, has none.

    Raises:
        UserError: where a card has an unknown schema.
    """
    if not Path(directory).is_dir() or not any(Path(directory).rglob("run_card.json")):
        return set()
    noted = (run_overrides(run) for run in collect_runs(directory) if run.status in statuses)
    return {point_key(overrides) for overrides in noted if overrides is not None}


def missing_points(
    directory: Path | str, points: Sequence[Sequence[str]], *, statuses: Collection[str] = ("completed",)
) -> list[int]:
    """Indices into `points` of those that are still to be run, in the order given.

    Args:
        directory: the sweep directory; need not exist yet.
        points: the overrides of each point, e.g. `["activation_checkpointing=stage", "seed=0"]`, in any
            order.

        statuses: a point whose card below `directory` has one of these is not run again. With
            `("completed", "out_of_memory")` a point that does not fit is not tried a second time.

    Raises:
        UserError: where two points are the same, or a card has an unknown schema.
    """
    keys = [point_key(point) for point in points]
    repeated = sorted({" ".join(key) for key in keys if keys.count(key) > 1})
    if repeated:
        raise UserError(f"the sweep has a point twice: {repeated[0]!r}; name each value once")
    done = settled_points(directory, statuses)
    return [index for index, key in enumerate(keys) if key not in done]


def _read_overrides(record: Path) -> list[str] | None:
    import yaml  # type: ignore[import-untyped, unused-ignore]

    try:
        value: Any = yaml.safe_load(record.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, str):
        return None
    return [str(item) for item in value]
