"""The report as `report.html`: one file that needs nothing beside it, for a phone as much as for a desk."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from seg4k.studies import markdown, words
from seg4k.studies.collect import Run
from seg4k.studies.plotting import arm_colour, out_of_memory_labels
from seg4k.studies.run_files import memory_parts, read_metrics, thin
from seg4k.studies.svg import curves_svg, pareto_svg

CURVES = (("train_loss", "training loss"), ("val_loss", "validation loss"), ("val_miou", "validation mIoU"))
"""Columns of metrics.csv that are drawn, with their names."""

_PICTURE_WIDTH = 900
_OUT = "ran out of memory"
_PART_NAMES = {"static": "static (parameters, gradients, optimizer)"}
_PART_COLOURS = {
    "parameters": "#4e79a7",
    "gradients": "#3d9a50",
    "optimizer": "#8a6bbf",
    "static": "#4e79a7",
    "activations": "#e0762a",
    "other": "#7c8894",
    "not split": "#7c8894",
    _OUT: "repeating-linear-gradient(45deg,#d1495b 0 6px,transparent 6px 12px)",
}


def render_page(report: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """The whole page for what `make_report` returned and the runs it came from.

    Every text is escaped; styles, plots and pictures are inside; there are no scripts.
    """
    directories = {run.name: run for run in runs}
    sections = [
        _section("Recommendation", _sentences(markdown.recommendation_lines(report)), "lead"),
        _section("Memory against speed", _figure(pareto_svg(report), _pareto_caption(report))),
        _section("Modes", _table(markdown.mode_table(report)) + _note(markdown.PEAK_NOTE)),
        _section("Where the peak goes", _memory_bars(report, directories)),
        _section("Acceptance", _table(markdown.acceptance_table(report), markdown.ACCEPTANCE_NOTE)),
        _section("Parity in words", _sentences(markdown.parity_lines(report))),
        _section("Each step to a finer mode", _sentences(markdown.step_lines(report["steps"]))),
        _section("Each step along the Pareto front", _sentences(markdown.step_lines(report["front_steps"]))),
        _section("Curves", _curves(report, directories)),
        _section("mIoU per seed, and its difference to the baseline", _table(markdown.miou_table(report))),
        _section("Sample predictions", _pictures(report, directories)),
        _section("Notes", _sentences(report["notes"])),
        _folded(f"Runs ({len(report['runs'])})", _table(markdown.run_table(report))),
        _section("Beside public figures", _table(markdown.PUBLIC_FIGURES)),
    ]
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Activation checkpointing report</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        "<h1>What activation checkpointing costs and saves</h1>\n"
        f"<p>{_code(markdown.summary_line(report))}</p>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{body}</section>' if body else ""


def _folded(title: str, body: str) -> str:
    """A section that opens at a touch, for what would be long on a phone."""
    return f"<section><details><summary>{escape(title)}</summary>{body}</details></section>"


def _code(text: str) -> str:
    """Escaped text, with what stands between backticks as code, and numbers kept beside their units."""
    text = re.sub(r"(?<=\d) (?=[GM]iB)", "\u00a0", escape(text))
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def _note(text: str) -> str:
    return f'<p class="note">{_code(text)}</p>'


def _sentences(lines: Iterable[str]) -> str:
    items = [_code(line) for line in lines]
    if len(items) == 1:
        return f"<p>{items[0]}</p>"
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>" if items else ""


def _table(table: markdown.Table, note: str = "") -> str:
    """A table that folds into one block per row on a narrow screen: each cell knows its column's name."""
    head, body = table
    if not body:
        return ""
    rows = []
    for line in body:
        cells = zip(head, line, strict=True)
        rows.append("".join(f'<td data-name="{escape(name)}">{_code(text)}</td>' for name, text in cells))
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead>\n<tbody>{lines}</tbody></table>" + (
        _note(note) if note else ""
    )


def _figure(picture: str, caption: str) -> str:
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>" if picture else ""


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    keys = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries
    )
    return f'<p class="legend">{keys}</p>'


def _pareto_caption(report: Mapping[str, Any]) -> str:
    text = "Filled diamonds: the Pareto front. Hollow circles: another mode is better in both. "
    text += "Small dots, where there are any: single seeds."
    lost = out_of_memory_labels(report)
    return text + (f" Ran out of memory: {', '.join(_code(f'`{label}`') for label in lost)}." if lost else "")


def _memory_bars(report: Mapping[str, Any], directories: Mapping[str, Run]) -> str:
    """One bar per arm, of the run with the middle peak; an arm that ran out of memory has a hatched bar."""
    bars: list[tuple[str, dict[str, float]]] = []
    for row in report["modes"]:
        runs = [run for run in report["runs"] if run["arm"] == row["label"] and run["peak_bytes"]]
        ended = sorted(
            (run for run in runs if run["status"] == "completed"), key=lambda run: run["peak_bytes"]
        )
        if ended:
            bars.append((row["label"], memory_parts(directories[ended[(len(ended) - 1) // 2]["dir"]])))
        elif row["out_of_memory"]:
            reached = max((run["peak_bytes"] for run in runs), default=row["device_bytes"] or 0)
            bars.append((row["label"], {_OUT: float(reached)}))
    most = max((sum(parts.values()) for _, parts in bars), default=0.0)
    if not most:
        return ""
    used = [part for part in _PART_COLOURS if any(parts.get(part) for _, parts in bars)]
    return _legend((_PART_NAMES.get(part, part), _PART_COLOURS[part]) for part in used) + "".join(
        _bar(*bar, most) for bar in bars
    )


def _bar(label: str, parts: Mapping[str, float], most: float) -> str:
    present = {part: count for part, count in parts.items() if count > 0}
    pieces = "".join(
        f'<b style="width:{100 * count / most:.3f}%;background:{_PART_COLOURS[part]}"></b>'
        for part, count in present.items()
    )
    total = ("over " if _OUT in present else "") + words.size(sum(present.values()))
    told = ", ".join(
        part if part == _OUT else f"{part} {words.size(count)}" for part, count in present.items()
    )
    return (
        f'<div class="bar"><div><code>{escape(label)}</code><span>{total}</span></div>'
        f'<div class="track">{pieces}</div><small>{escape(told)}</small></div>'
    )


def _curves(report: Mapping[str, Any], directories: Mapping[str, Run]) -> str:
    arms = [row["label"] for row in report["modes"]]
    tables = [
        (arms.index(run["arm"]), read_metrics(directories[run["dir"]].directory)) for run in report["runs"]
    ]
    figures = ""
    shown: set[int] = set()
    for column, name in CURVES:
        curves = [(index, thin(columns.get(column, []))) for index, columns in tables]
        figures += _figure(curves_svg(curves, len(arms), name), escape(name[0].upper() + name[1:]))
        shown.update(index for index, points in curves if len(points) > 1)
    if not figures:
        return ""
    legend = _legend((arms[index], arm_colour(index)) for index in sorted(shown))
    note = _note("One curve per run. Where curves coincide they show as bands, the first mode outermost.")
    return f'{legend}<div class="curves">{figures}</div>{note}'


def _pictures(report: Mapping[str, Any], directories: Mapping[str, Run]) -> str:
    """The first picture that each arm has."""
    figures: dict[str, str] = {}
    for run in report["runs"]:
        if run["arm"] in figures:
            continue
        data = _picture(directories[run["dir"]].directory / "val_samples.png")
        if data:
            arm = escape(run["arm"])
            caption = f"<code>{arm}</code>" + ("" if run["seed"] is None else f", seed {run['seed']}")
            figures[run["arm"]] = _figure(f'<img alt="sample predictions of {arm}" src="{data}">', caption)
    return f'<div class="pictures">{"".join(figures.values())}</div>' if figures else ""


def _picture(file: Path) -> str:
    """The picture, made smaller, as a data URI; empty where there is none or it is damaged."""
    import cv2
    import numpy as np

    if not file.is_file() or not file.stat().st_size:
        return ""
    image = cv2.imdecode(np.fromfile(file, dtype=np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        return ""
    height, width = image.shape[:2]
    if width > _PICTURE_WIDTH:
        scaled = (_PICTURE_WIDTH, max(1, round(height * _PICTURE_WIDTH / width)))
        image = cv2.resize(image, scaled, interpolation=cv2.INTER_AREA)
    written, coded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 85])
    return f"data:image/jpeg;base64,{base64.b64encode(coded.tobytes()).decode('ascii')}" if written else ""
