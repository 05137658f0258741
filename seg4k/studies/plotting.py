"""What the plots of a report share: colours, axes, and labels that do not cover each other."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

COLOURS = (
    "#4e79a7",
    "#e0762a",
    "#3d9a50",
    "#d1495b",
    "#8a6bbf",
    "#a0785a",
    "#c65fa0",
    "#7c8894",
    "#b0912a",
    "#2fa3b0",
)
"""Readable on white and on black; one for each arm, in order, repeating after the last."""

Box = tuple[float, float, float, float]
"""(left, low, right, high)."""


def arm_colour(index: int) -> str:
    """The colour of the arm at this place of the report."""
    return COLOURS[index % len(COLOURS)]


def byte_unit(most: float) -> tuple[float, str]:
    """The unit for an axis that reaches `most` bytes."""
    return (2.0**30, "GiB") if most >= 2**30 else (2.0**20, "MiB")


def plot_range(values: Sequence[float], margin: float) -> tuple[float, float]:
    """From the least to the largest value and a share of the span beyond either; (0, 1) without values."""
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    reach = (high - low) * margin if high > low else 0.1 * abs(high) or 1.0
    return low - reach, high + reach


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) within [low, high], at most `most` + 1 of them."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(
        factor * power for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (factor * power) <= most
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    area: Box,
    radius: float,
    *,
    lines: Sequence[Box] = (),
    left_first: Sequence[bool] = (),
) -> list[tuple[float, float]]:
    """Where to write a label beside each point so that none covers another label, a point or a line.

    Args:
        points: (x, y) of each, in any unit of length that is the same on both axes.
        sizes: (width, height) of each label.
        area: that labels should stay inside.
        radius: of the markers.
        lines: boxes around what labels should keep off where they can.
        left_first: for each point whether the left is tried before the right (nothing lies to the upper
            left of a point on a Pareto front); not for any if empty.

    Returns:
        The (left, low) corner of each label: the first free place, tried beside the point, above, below and
        farther off; where all are taken, the one that overlaps least.
    """
    markers = [(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    taken: list[Box] = []

    def badness(box: Box) -> float:
        covered = sum(_overlap(box, other) for other in (*taken, *markers))
        return 4 * _outside(box, area) + covered + 0.5 * sum(_overlap(box, line) for line in lines)

    for number, ((x, y), (width, height)) in enumerate(zip(points, sizes, strict=True)):
        first = -1 if left_first and left_first[number] else 1
        sides = ((first, 0), (-first, 0), (0, 1), (0, -1), (first, 1), (first, -1), (-first, 1), (-first, -1))
        candidates: list[Box] = []
        for away in (1.5 * radius, 3 * radius, 5 * radius, 8 * radius, 12 * radius):
            for side, up in sides:
                left = x + side * away - (0.5 - 0.5 * side) * width
                low = y + up * away - (0.5 - 0.5 * up) * height
                candidates.append((left, low, left + width, low + height))
        taken.append(min(candidates, key=badness))
    return [box[:2] for box in taken]


def front_lines(points: Sequence[tuple[float, float]], thickness: float) -> list[Box]:
    """Boxes around the steps of a Pareto front through `points`, ordered by x."""
    boxes = []
    for (x0, y0), (x1, y1) in pairwise(points):
        boxes.append((x0, y0 - thickness, x1, y0 + thickness))
        boxes.append((x1 - thickness, min(y0, y1), x1 + thickness, max(y0, y1)))
    return boxes


def measured_rows(report: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """The modes of a report that have a peak and a speed, with their places in it."""
    return [
        (index, row)
        for index, row in enumerate(report["modes"])
        if row["peak_bytes"] and row["samples_per_second_per_device"]
    ]


def seed_points(report: Mapping[str, Any], row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(peak bytes, samples/s of one device) of each run of a mode; none where there is one run only."""
    runs = [run for run in report["runs"] if run["arm"] == row["label"] and run["status"] == "completed"]
    points = [
        (float(run["peak_bytes"]), run["samples_per_second"] / run["devices"])
        for run in runs
        if run["peak_bytes"] and run["samples_per_second"]
    ]
    return points if len(points) > 1 else []


def speed_name(report: Mapping[str, Any]) -> str:
    """What the axis of speed shows."""
    several = any(row["devices"] > 1 for row in report["modes"])
    return "samples per second and device" if several else "samples per second"


def plot_title(report: Mapping[str, Any]) -> str:
    """What the Pareto plot shows, and on what device where that is one."""
    names = list(dict.fromkeys(row["device_name"] for row in report["modes"] if row["device_name"]))
    return "Peak memory against throughput" + (f", {names[0]}" if len(names) == 1 else "")


def out_of_memory_labels(report: Mapping[str, Any]) -> list[str]:
    """Modes of which every run that could tell ran out of memory: they have no place in a plot."""
    return [row["label"] for row in report["modes"] if row["out_of_memory"] and not row["completed"]]


def _overlap(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Box, area: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, area)
