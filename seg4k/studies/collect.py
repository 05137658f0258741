"""Find the runs below a directory and read their cards, whatever state they were left in."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seg4k.errors import UserError

CARD_NAME = "run_card.json"
CARD_SCHEMA = 1
STATUSES = ("completed", "out_of_memory", "failed", "interrupted")
MODES = ("none", "stage", "block", "layer", "encoder", "decoder", "selective", "auto", "plan")
"""Every mode, in the order in which reports list them."""

NO_CARD = "no run card: the run was killed before it could write one, or has not ended yet"
_SEED_DIRECTORY = re.compile(r"seed=-?\d+")
_OVERRIDE_LINE = re.compile(r"""^\s*-\s*['"]?(?P<key>[\w./+-]+)=(?P<value>[^'"]*)['"]?\s*$""")


@dataclass(frozen=True)
class Run:
    """One run directory and what its card says.

    Attributes:
        directory: where it lies.
        name: the same relative to the directory that was searched, with forward slashes ("." for itself).
        status: one of `STATUSES`.
        error: what went wrong, or None.
        mode: the activation checkpointing mode ("unknown" where nothing tells).
        seed: the seed, or None where nothing tells.
        card: the run card, empty where there is none.
    """

    directory: Path
    name: str
    status: str
    error: str | None
    mode: str
    seed: int | None
    card: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def completed(self) -> bool:
        """Whether the run ended by itself, with its results on the card."""
        return self.status == "completed"

    @property
    def strategy(self) -> str:
        """The parallel strategy, "" where the card does not say or the run ended before it had one."""
        return _reached(self.card.get("strategy"))

    @property
    def device_name(self) -> str:
        """What it ran on, "" where the card does not say."""
        return _reached(lookup(self.card, "device", "name"))

    @property
    def devices(self) -> int:
        """Number of devices that trained together, 1 where the card does not say."""
        count = number(self.card, "device", "count")
        return int(count) if count is not None and count >= 1 else 1

    @property
    def peak_bytes(self) -> int | None:
        """Measured peak of one device in bytes."""
        peak = number(self.card, "memory", "peak_bytes")
        return int(peak) if peak is not None and peak > 0 else None

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of all devices together."""
        speed = number(self.card, "throughput", "samples_per_second")
        return speed if speed is not None and speed > 0 else None

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The card's validation metrics (`val_miou`, `val_iou`, `val_loss`), empty where there are none."""
        metrics = self.card.get("metrics")
        return metrics if isinstance(metrics, Mapping) else {}


def lookup(card: Mapping[str, Any], *path: str) -> Any:  # noqa: ANN401 - any JSON value
    """The value at `path` in nested mappings, None where a step is missing."""
    value: Any = card
    for step in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(step)
    return value


def number(card: Mapping[str, Any], *path: str) -> float | None:
    """The finite number at `path`, None where there is none."""
    value = lookup(card, *path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _reached(value: object) -> str:
    """A text of the card, "" for what the run ended too early to know."""
    return "" if value in (None, "not reached") else str(value)


def collect_runs(directory: Path | str) -> list[Run]:
    """Every run below `directory` at any depth, ordered by mode, seed and name.

    A directory that was evidently meant for a run (Hydra's `.hydra`, a `metrics.csv`, a name like `seed=0`)
    but holds no card, or a damaged one, is a run with status `failed`. Hidden directories are not searched.

    Raises:
        UserError: where `directory` is not a directory, holds no run card, or holds a card of another schema.
    """
    root = Path(directory)
    if not root.is_dir():
        raise UserError(f"{root} is not a directory: give the directory of a sweep or of its runs")
    with_card, hydra, others = _candidates(root)
    if not with_card:
        hint = f" ({len(hydra) + len(others)} run directories without a card)" if hydra or others else ""
        raise UserError(
            f"no {CARD_NAME} below {root}{hint}: give the directory of a sweep in which a run has ended"
        )
    bare = [path for path in hydra if not _any_below(path, with_card) and not _any_below(path, hydra)]
    known = [*with_card, *bare]
    bare += [
        path for path in others if not _any_below(path, known) and not _any_above(path, [*known, *others])
    ]
    runs = [_read_run(root, path) for path in with_card] + [_bare_run(root, path) for path in bare]
    return sorted(runs, key=run_order)


def run_order(run: Run) -> tuple[Any, ...]:
    """Sort key: mode in the order of `MODES` (unknown ones last), devices, strategy, seed, name."""
    return (*mode_order(run.mode), run.devices, run.strategy, _seed_order(run.seed), run.name)


def mode_order(mode: str) -> tuple[int, str]:
    """Sort key of a mode: its place in `MODES`; unknown modes come after, by name."""
    return (MODES.index(mode), "") if mode in MODES else (len(MODES), mode)


def _seed_order(seed: int | None) -> tuple[bool, int]:
    return (seed is None, seed or 0)


def _candidates(root: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Directories with a card; without one but with `.hydra`; with other signs of a run only."""
    with_card: list[Path] = []
    hydra: list[Path] = []
    others: list[Path] = []
    for name, children, files in os.walk(root):
        path = Path(name)
        if CARD_NAME in files:
            with_card.append(path)
        elif ".hydra" in children:
            hydra.append(path)
        elif "metrics.csv" in files or _SEED_DIRECTORY.fullmatch(path.name):
            others.append(path)
        children[:] = [child for child in children if not child.startswith(".")]
    return with_card, hydra, others


def _any_below(path: Path, others: list[Path]) -> bool:
    return any(path in other.parents for other in others)


def _any_above(path: Path, others: list[Path]) -> bool:
    return any(other in path.parents for other in others)


def _relative(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def _read_run(root: Path, path: Path) -> Run:
    file = path / CARD_NAME
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # cut short or not UTF-8: cards are written atomically, so something else damaged it
        return _bare_run(root, path, f"{CARD_NAME} is damaged: not valid JSON")
    schema = card.get("schema") if isinstance(card, dict) else None
    if schema != CARD_SCHEMA or isinstance(schema, bool):
        raise UserError(
            f"{file} has schema {schema!r}, and this version of seg4k reads schema {CARD_SCHEMA}: "
            "read it with the version that wrote it, or move it out of the directory"
        )
    status = card.get("status")
    if status not in STATUSES:
        raise UserError(
            f"{file} has status {status!r}, which is none of {', '.join(STATUSES)}: repair or move it"
        )
    mode, seed = _told_by_path(root, path)
    mode = lookup(card, "activation_checkpointing", "mode") or mode
    seed = card["seed"] if isinstance(card.get("seed"), int) else seed
    error = card.get("error")
    return Run(
        path, _relative(root, path), status, None if error is None else str(error), str(mode), seed, card
    )


def _bare_run(root: Path, path: Path, error: str = NO_CARD) -> Run:
    mode, seed = _told_by_path(root, path)
    return Run(path, _relative(root, path), "failed", error, mode, seed)


def _told_by_path(root: Path, path: Path) -> tuple[str, int | None]:
    """Mode and seed of a run as Hydra's record of its overrides, else its directory's name, has them."""
    mode, seed = "unknown", None
    for part in path.relative_to(root).parts:
        if part in MODES:
            mode = part
        if _SEED_DIRECTORY.fullmatch(part):
            seed = int(part.removeprefix("seed="))
    record = path / ".hydra" / "overrides.yaml"
    if record.is_file():
        for line in record.read_text(encoding="utf-8", errors="replace").splitlines():
            match = _OVERRIDE_LINE.match(line)
            if match is None:
                continue
            if match["key"] in ("activation_checkpointing", "activation_checkpointing.mode"):
                mode = match["value"].strip()
            elif match["key"] == "seed" and re.fullmatch(r"-?\d+", match["value"].strip()):
                seed = int(match["value"])
    return mode, seed
