"""The Pareto plot as a file: peak memory against throughput, one point per mode."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seg4k.files import atomic_path
from seg4k.studies.plotting import (
    arm_colour,
    byte_unit,
    front_lines,
    measured_rows,
    out_of_memory_labels,
    place_labels,
    plot_range,
    plot_title,
    seed_points,
    speed_name,
)

_POINT = 1 / 72  # inches
_LETTER = 6.0  # points, of a label's average letter
_LABEL_HEIGHT = 12.0  # points
_RADIUS = 6.0  # points, of a marker


def write_pareto_png(path: Path, report: Mapping[str, Any]) -> None:
    """Write the Pareto plot of what `make_report` returned as a PNG (1275 x 870 pixels), atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = measured_rows(report)
    unit, unit_name = byte_unit(max((row["peak_bytes"] for _, row in rows), default=2**30))
    figure = Figure(figsize=(8.5, 5.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(f"peak memory of one device ({unit_name}), less is better\n\n{_legend(report)}")
    axes.set_ylabel(f"{speed_name(report)}, more is better")
    axes.set_title(plot_title(report), loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for index, row in rows:
        for peak, speed in seed_points(report, row):
            axes.plot(peak / unit, speed, "o", ms=4, alpha=0.4, mec="none", color=arm_colour(index))
    places = [(row["peak_bytes"] / unit, row["samples_per_second_per_device"]) for _, row in rows]
    front = sorted(place for place, (_, row) in zip(places, rows, strict=True) if row["on_front"])
    axes.plot(
        *zip(*front, strict=True) if front else ([], []),
        drawstyle="steps-post",
        color="#888",
        lw=1.2,
        zorder=1,
    )
    for (index, row), place in zip(rows, places, strict=True):
        colour = arm_colour(index)
        marker, fill = ("D", colour) if row["on_front"] else ("o", "white")
        axes.plot(*place, marker, ms=9, color=colour, mfc=fill, mew=1.8)
    left, right = plot_range([x for x, _ in places], 0.12)
    room = max((len(row["label"]) for _, row in rows), default=0) * _LETTER / 560  # of the width, for a label
    axes.set_xlim(max(0.0, left - max(0.0, room - 0.1) * (right - left)), right)
    axes.margins(y=0.14)
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    if not rows:
        axes.text(0.5, 0.5, "no completed run has a peak and a speed", ha="center", transform=axes.transAxes)
    figure.draw_without_rendering()  # the layout decides where on the paper the points lie

    def paper(place: tuple[float, float]) -> tuple[float, float]:
        x, y = axes.transData.transform(place) / figure.dpi / _POINT
        return float(x), float(y)

    window = [float(edge) / figure.dpi / _POINT for edge in axes.get_window_extent().extents]
    at = [paper(place) for place in places]
    sizes = [(_LETTER * len(row["label"]) + 2, _LABEL_HEIGHT) for _, row in rows]
    corners = place_labels(
        at,
        sizes,
        (window[0], window[1], window[2], window[3]),
        _RADIUS,
        lines=front_lines([paper(place) for place in front], 2.0),
        left_first=[row["on_front"] for _, row in rows],
    )
    for (index, row), place, (x, y), (left, low), size in zip(rows, places, at, corners, sizes, strict=True):
        center = (left + size[0] / 2, low + size[1] / 2)
        gap = max(abs(center[0] - x) - size[0] / 2, abs(center[1] - y) - size[1] / 2)
        axes.annotate(
            row["label"],
            place,
            xytext=(center[0] - x, center[1] - y),
            textcoords="offset points",
            ha="center",
            va="center",
            color=arm_colour(index),
            arrowprops={"arrowstyle": "-", "lw": 0.6, "color": "#999"} if gap > 2.5 * _RADIUS else None,
        )
    with atomic_path(path) as temporary:
        figure.savefig(temporary, metadata={"Software": None})


def _legend(report: Mapping[str, Any]) -> str:
    text = "◆ on the Pareto front     ○ another mode is better in both"
    if any(seed_points(report, row) for _, row in measured_rows(report)):
        text += "     small dots: single seeds"
    lost = out_of_memory_labels(report)
    return text + ("\nran out of memory: " + ", ".join(f'"{label}"' for label in lost) if lost else "")
