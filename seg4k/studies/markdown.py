"""The report as `report.md`: tables and sentences for a terminal, a pull request or a wiki."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seg4k.studies import words

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and body; text between backticks is code."""

PUBLIC_FIGURES: Table = (
    ("case", "peak", "speed", "source"),
    (
        (
            "ViT-B + U-Net at 4K, stages and blocks recomputed",
            "-39%",
            "-28%",
            "this project's starting point",
        ),
        ("Llama 3.2 3B, full checkpointing", "-42%", "-21%", "torchtune README"),
        ("1,000-layer ResNet", "-85%", "+30% time", "arXiv 1604.06174"),
        ("timm hgnetv2_b5", "-56%", "-", "timm PR 2253"),
    ),
)
"""What others have published of activation checkpointing."""

PEAK_NOTE = (
    "Peak is the most memory that tensors held on one device, the median over seeds. Ratios are taken "
    "between runs of the same seed. Slowdown is time per sample against the baseline: median and range."
)
ACCEPTANCE_NOTE = "Asked for: peak down 30% or more; time per sample up by 40% at most; mIoU parity."


def render_markdown(report: Mapping[str, Any]) -> str:
    """The whole of `report.md` for what `make_report` returned."""
    front = ", ".join(f"`{label}`" for label in report["pareto"])
    parts = [
        "# What activation checkpointing costs and saves",
        summary_line(report),
        *_section("Recommendation", recommendation_lines(report)),
        "## Modes",
        _render(mode_table(report)),
        PEAK_NOTE + (f" On the Pareto front (◆), fastest first: {front}." if front else ""),
        "![Peak memory against throughput, one point per mode](pareto.png)",
        *_titled("## Acceptance", acceptance_table(report), ACCEPTANCE_NOTE),
        *_section("Parity in words", parity_lines(report)),
        *_titled("## mIoU per seed, and its difference to the baseline", miou_table(report)),
        *_section("Each step to a finer mode", step_lines(report["steps"])),
        *_section("Each step along the Pareto front", step_lines(report["front_steps"])),
        *_section("Notes", report["notes"]),
        *_titled("## Runs", run_table(report)),
        *_titled("## Beside public figures", PUBLIC_FIGURES),
    ]
    return "\n\n".join(parts) + "\n"


def several_groups(report: Mapping[str, Any]) -> bool:
    """Whether more than one combination of strategy and device count occurs."""
    return len({(row["strategy"], row["devices"]) for row in report["modes"]}) > 1


def summary_line(report: Mapping[str, Any]) -> str:
    """How many runs there are and what they are compared with."""
    done = sum(row["completed"] for row in report["modes"])
    return (
        f"{done} of {len(report['runs'])} runs completed. Compared with `{report['baseline_mode']}`, seed by "
        f"seed; parity margin ±{report['margin']:.2g} mIoU."
    )


def recommendation_lines(report: Mapping[str, Any]) -> list[str]:
    """One paragraph for each strategy and device count."""
    if not several_groups(report):
        return [entry["words"] for entry in report["recommendations"]]
    return [
        f"{words.group_name(entry['strategy'], entry['devices'])}: {entry['words']}"
        for entry in report["recommendations"]
    ]


def parity_lines(report: Mapping[str, Any]) -> list[str]:
    """The verdict of each mode as a sentence."""
    return [f"`{row['label']}`: {row['parity_words']}." for row in report["modes"]]


def step_lines(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each step as a sentence."""
    return [f"`{step['from']}` → `{step['to']}`: {step['words']}." for step in steps]


def mode_table(report: Mapping[str, Any]) -> Table:
    """The modes; with samples/s per device where strategy or device count vary."""
    several = several_groups(report)
    speed = ["samples/s", "per device"] if several else ["samples/s"]
    head = ["mode", "runs", "peak", "to baseline", *speed, "slowdown", "mIoU Δ max", "parity"]
    body = []
    for row in report["modes"]:
        all_done = row["completed"] == row["runs"]
        lost = row["out_of_memory"] and not row["completed"]
        speeds = [row["samples_per_second"], row["samples_per_second_per_device"]][: len(speed)]
        body.append(
            [
                f"`{row['label']}`{' ◆' if row['on_front'] else ''}",
                str(row["runs"]) if all_done else f"{row['completed']} of {row['runs']}",
                "out of memory" if lost else words.size(row["peak_bytes"]),
                words.ratio(row),
                *map(words.three_digits, speeds),
                words.slowdown(row),
                words.delta(row["miou_delta_max"]),
                words.PARITY[row["parity"]],
            ]
        )
    return head, body


def acceptance_table(report: Mapping[str, Any]) -> Table:
    """Per mode the three things asked for, and whether all are met."""
    answers = {True: "yes", False: "no", None: "open"}
    parities = {row["label"]: words.PARITY[row["parity"]] for row in report["modes"]}
    body = [
        [
            f"`{entry['mode']}`",
            _mark(entry["peak_down_30"], entry["words"][0]),
            _mark(entry["slowdown_acceptable"], entry["words"][1]),
            _mark(entry["parity"], parities[entry["mode"]]),
            answers[entry["accepted"]],
        ]
        for entry in report["acceptance"]
    ]
    return ["mode", "memory", "slowdown", "parity", "accepted"], body


def miou_table(report: Mapping[str, Any]) -> Table:
    """Each seed's mIoU with its difference to the baseline."""
    seeds = sorted({run["seed"] for run in report["runs"]}, key=lambda seed: (seed is None, seed))
    body = []
    for row in report["modes"]:
        is_baseline = row["mode"] == report["baseline_mode"]
        cells = []
        for seed in seeds:
            runs = [run for run in report["runs"] if run["arm"] == row["label"] and run["seed"] == seed]
            cells.append(", ".join(_miou_cell(run, is_baseline) for run in runs) or "-")
        body.append([f"`{row['label']}`", *cells])
    return ["mode", *("no seed" if seed is None else f"seed {seed}" for seed in seeds)], body


def run_table(report: Mapping[str, Any]) -> Table:
    """Every run with its status, and the error of those that have one."""
    head = ["run", "mode", "seed", "status", "peak", "samples/s", "mIoU", "error"]
    body = [
        [
            f"`{run['dir']}`",
            f"`{run['arm']}`",
            "-" if run["seed"] is None else str(run["seed"]),
            words.STATUS[run["status"]],
            words.size(run["peak_bytes"]),
            words.three_digits(run["samples_per_second"]),
            words.miou(run["val_miou"]),
            words.shorten(run["error"]),
        ]
        for run in report["runs"]
    ]
    if not any(run["error"] for run in report["runs"]):
        return head[:-1], [line[:-1] for line in body]
    return head, body


def _miou_cell(run: Mapping[str, Any], is_baseline: bool) -> str:
    if run["status"] != "completed":
        return words.STATUS[run["status"]]
    text = words.miou(run["val_miou"])
    if is_baseline or run["miou_delta"] is None:
        return text
    return f"{text} ({words.delta(run['miou_delta'], signed=True)})"


def _mark(met: bool | None, text: str) -> str:
    return {True: "✓ ", False: "✗ ", None: "? "}[met] + text


def _titled(title: str, table: Table, note: str = "") -> list[str]:
    if not table[1]:
        return []
    return [title, _render(table), note] if note else [title, _render(table)]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    safe = [line.replace("<", "&lt;") for line in lines]
    return [f"## {title}", safe[0] if len(safe) == 1 else "\n".join(f"- {line}" for line in safe)]


def _render(table: Table) -> str:
    head, body = table
    lines: Iterable[Sequence[str]] = (
        [_cell(text) for text in line] for line in (head, ["---"] * len(head), *body)
    )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
