"""What the page shows of single runs: the parts of their memory and the curves of their training."""

import csv
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from seg4k.studies.collect import Run, lookup, number

PARTS = ("parameters", "gradients", "optimizer", "activations")
"""Parts of the peak, as the card's optional `memory.breakdown` names them, in bytes."""

CURVE_POINTS = 240


def memory_parts(run: Run) -> dict[str, float]:
    """The peak of a run split into its parts, in bytes.

    With `memory.breakdown` on the card: parameters, gradients, optimizer, activations, and the rest as
    `other`; they sum to more than the peak where not all of them live at that moment. Without: `static`
    (parameters, gradients and optimizer state together) and activations.
    """
    peak = float(run.peak_bytes or 0)
    if isinstance(lookup(run.card, "memory", "breakdown"), Mapping):
        parts = {part: max(0.0, number(run.card, "memory", "breakdown", part) or 0.0) for part in PARTS}
        rest = peak - sum(parts.values())
        return {**parts, "other": rest} if rest > 0.005 * peak else parts
    static = number(run.card, "memory", "static_bytes")
    if static is None or not 0 <= static <= peak:
        return {"not split": peak}
    return {"static": static, "activations": peak - static}


def read_metrics(directory: Path) -> dict[str, list[tuple[float, float]]]:
    """Column -> (step, value) points of a run's `metrics.csv`, without blank or damaged cells."""
    columns: dict[str, list[tuple[float, float]]] = {}
    file = directory / "metrics.csv"
    if not file.is_file():
        return columns
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        for row in csv.DictReader(line.replace("\0", "") for line in lines):
            step = _finite(row.get("step"))
            if step is None:
                continue
            for column, text in row.items():
                value = _finite(text)
                if isinstance(column, str) and value is not None:
                    columns.setdefault(column, []).append((step, value))
    return columns


def thin(points: Sequence[tuple[float, float]], most: int = CURVE_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: the mean of each of so many equal shares."""
    if len(points) <= most:
        return list(points)
    edges = [share * len(points) // most for share in range(most + 1)]
    shares = [points[start:end] for start, end in pairwise(edges)]
    return [
        (math.fsum(x for x, _ in part) / len(part), math.fsum(y for _, y in part) / len(part))
        for part in shares
    ]


def _finite(text: object) -> float | None:
    if not isinstance(text, str):
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
