"""The plots of the report's page as inline SVG, whose colours of text and lines the page's style decides."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from seg4k.studies.plotting import (
    arm_colour,
    byte_unit,
    front_lines,
    measured_rows,
    nice_ticks,
    place_labels,
    plot_range,
    plot_title,
    seed_points,
    speed_name,
)

WIDTH, HEIGHT = 360, 290
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 350, 10, 250
_LETTER, _LABEL_HEIGHT, _RADIUS = 6.6, 12.0, 5.0

Curve = tuple[int, Sequence[tuple[float, float]]]


def pareto_svg(report: Mapping[str, Any]) -> str:
    """The Pareto plot of a report; empty where no mode was measured."""
    rows = measured_rows(report)
    if not rows:
        return ""
    unit, unit_name = byte_unit(max(row["peak_bytes"] for _, row in rows))
    places = [(row["peak_bytes"] / unit, row["samples_per_second_per_device"]) for _, row in rows]
    seeds = [(index, peak / unit, speed) for index, row in rows for peak, speed in seed_points(report, row)]
    room = min(0.4, max(len(row["label"]) for _, row in rows) * _LETTER / (_RIGHT - _LEFT))
    across = _Axis(
        [*(x for x, _ in places), *(x for _, x, _ in seeds)], _LEFT, _RIGHT, room=max(0.0, room - 0.1)
    )
    upward = _Axis([*(y for _, y in places), *(y for _, _, y in seeds)], _BOTTOM, _TOP)
    at = [(across.place(x), upward.place(y)) for x, y in places]
    front = sorted(place for place, (_, row) in zip(at, rows, strict=True) if row["on_front"])
    steps = "".join(f"H{x:.1f}V{y:.1f}" for x, y in front[1:])
    body = [
        _frame(across, upward, f"peak memory of one device ({unit_name})", speed_name(report)),
        f'<path class="front" d="M{front[0][0]:.1f} {front[0][1]:.1f}{steps}"/>' if front else "",
    ]
    for index, peak, speed in seeds:
        x, y = across.place(peak), upward.place(speed)
        body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{arm_colour(index)}" opacity=".5"/>')
    sizes = [(_LETTER * len(row["label"]), _LABEL_HEIGHT) for _, row in rows]
    area = (_LEFT - 4.0, _TOP - 6.0, WIDTH - 2.0, _BOTTOM)
    left_first = [row["on_front"] for _, row in rows]
    lines = front_lines(front, 1.5)
    corners = place_labels(at, sizes, area, _RADIUS, lines=lines, left_first=left_first)
    for (index, row), place, corner, size in zip(rows, at, corners, sizes, strict=True):
        body.append(_marker(place, arm_colour(index), filled=row["on_front"]))
        body.append(_label(row["label"], place, corner, size))
    return _picture("".join(body), plot_title(report))


def curves_svg(curves: Sequence[Curve], arms: int, name: str) -> str:
    """Curves over the step; empty where no curve has two points.

    Args:
        curves: (index of the arm, its (step, value) points). The first arms are drawn broad and the later
            ones narrow, so that curves which coincide show as bands, one inside the other.
        arms: how many arms there are.
        name: of the value.
    """
    drawn = [(index, points) for index, points in curves if len(points) > 1]
    if not drawn:
        return ""
    across = _Axis([x for _, points in drawn for x, _ in points], _LEFT, _RIGHT, margin=0.0)
    upward = _Axis([y for _, points in drawn for _, y in points], _BOTTOM, _TOP, margin=0.04)
    body = [_frame(across, upward, "step", name)]
    for index, points in drawn:
        width = 1.2 + 5.6 * (1 - index / max(arms - 1, 1))
        path = " ".join(f"{across.place(x):.1f},{upward.place(y):.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" stroke="{arm_colour(index)}" stroke-width="{width:.1f}"/>')
    return _picture("".join(body), f"{name} over the step")


class _Axis:
    """A linear scale from data to a span of the picture."""

    def __init__(
        self, values: Sequence[float], start: float, end: float, *, margin: float = 0.12, room: float = 0.0
    ) -> None:
        low, high = plot_range(values, margin)
        low -= room * (high - low)  # kept free for labels
        self.low, self.high = max(0.0, low) if min(values) >= 0 else low, high
        self.start, self.end = start, end

    def place(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        return nice_ticks(self.low, self.high)


def _picture(body: str, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{body}</svg>'


def _frame(across: _Axis, upward: _Axis, x_name: str, y_name: str) -> str:
    parts = []
    for tick in across.ticks():
        x = across.place(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{_BOTTOM + 14}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in upward.ticks():
        y = upward.place(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 4}" y="{y + 3.5:.1f}" text-anchor="end">{tick:g}</text>'
        )
    x, y = (_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2
    parts.append(f'<text class="axis" x="{x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>')
    turned = f'transform="translate(11 {y}) rotate(-90)"'
    parts.append(f'<text class="axis" {turned} text-anchor="middle">{escape(y_name)}</text>')
    return "".join(parts)


def _marker(place: tuple[float, float], colour: str, *, filled: bool) -> str:
    x, y = place
    if filled:
        return f'<path d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z" fill="{colour}"/>'
    style = f'fill="var(--card)" stroke="{colour}" stroke-width="1.8"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {style}/>'


def _label(
    text: str, place: tuple[float, float], corner: tuple[float, float], size: tuple[float, float]
) -> str:
    (x, y), (left, low), (width, height) = place, corner, size
    near = (min(max(x, left), left + width), min(max(y, low), low + height))
    leader = ""
    if math.dist(near, place) > 2.5 * _RADIUS:
        leader = f'<line class="leader" x1="{x:.1f}" y1="{y:.1f}" x2="{near[0]:.1f}" y2="{near[1]:.1f}"/>'
    # The length is given so that no font makes the label longer than the place kept free for it.
    length = f'textLength="{width:.0f}" lengthAdjust="spacingAndGlyphs"'
    return f'{leader}<text class="name" x="{left:.1f}" y="{low + 10:.1f}" {length}>{escape(text)}</text>'
