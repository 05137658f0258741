"""From the run cards below a directory to one verdict, as JSON, Markdown, a picture and a page."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seg4k.errors import UserError
from seg4k.files import write_json, write_text
from seg4k.studies.arms import Arm, baseline_of, differing_keys, make_arms, paired
from seg4k.studies.collect import MODES, Run, collect_runs, lookup, number
from seg4k.studies.findings import make_acceptance, make_front_steps, make_recommendations, make_steps
from seg4k.studies.pareto import pareto_front
from seg4k.studies.parity import DEFAULT_MARGIN, Parity, check_margin, judge_parity
from seg4k.studies.words import shorten

SCHEMA = 1
_MOST_DIFFERENCES = 6


def make_report(
    directory: Path | str, *, baseline_mode: str = "none", margin: float = DEFAULT_MARGIN
) -> dict[str, Any]:
    """Read the run cards below `directory` and compare every mode with the baseline.

    Args:
        directory: a sweep directory, or any directory with runs below it.
        baseline_mode: the mode that the others are compared with.
        margin: largest mean difference of val_miou that counts as parity.

    Returns:
        The report, JSON values only. It depends on the cards alone: no dates, no absolute paths. Ratios and
        differences are taken between runs of the same seed; `peak_ratio` and `slowdown` are their medians.

    Raises:
        UserError: where there is no run card, a card has another schema, or an argument makes no sense.
    """
    return _report(collect_runs(directory), baseline_mode, margin)


def write_report(
    directory: Path | str, *, baseline_mode: str = "none", margin: float = DEFAULT_MARGIN
) -> dict[str, Any]:
    """Make the report and write it as four files into `directory`, each atomically; return it.

    The files: `report.json`, `report.md`, `pareto.png`, and `report.html`, which needs nothing beside it.

    Raises:
        UserError: as `make_report`.
    """
    from seg4k.studies.markdown import render_markdown
    from seg4k.studies.page import render_page
    from seg4k.studies.pareto_png import write_pareto_png

    root = Path(directory)
    runs = collect_runs(root)
    report = _report(runs, baseline_mode, margin)
    write_json(root / "report.json", report)
    write_text(root / "report.md", render_markdown(report))
    write_pareto_png(root / "pareto.png", report)
    write_text(root / "report.html", render_page(report, runs))
    return report


def _report(runs: Sequence[Run], baseline_mode: str, margin: float) -> dict[str, Any]:
    check_margin(margin)
    modes = {run.mode for run in runs}
    if baseline_mode not in modes and baseline_mode not in MODES:
        raise UserError(f"the baseline mode {baseline_mode!r} is not one of {', '.join(sorted(modes))}")
    arms = make_arms(runs)
    rows = [_mode_row(arm, baseline_of(arm, arms, baseline_mode), margin) for arm in arms]
    points = {
        row["label"]: (row["peak_bytes"], row["samples_per_second_per_device"])
        for row in rows
        if row["peak_bytes"] and row["samples_per_second_per_device"]
    }
    front = pareto_front(points)
    for row in rows:
        row["on_front"] = row["label"] in front
    return {
        "schema": SCHEMA,
        "baseline_mode": baseline_mode,
        "margin": margin,
        "runs": [_run_row(run, arm, arms, baseline_mode) for arm in arms for run in arm.runs],
        "modes": rows,
        "pareto": front,
        "steps": make_steps(arms),
        "front_steps": make_front_steps(arms, front),
        "acceptance": make_acceptance(rows, baseline_mode),
        "recommendations": make_recommendations(rows, baseline_mode),
        "notes": _notes(arms, baseline_mode),
    }


def _run_row(run: Run, arm: Arm, arms: Sequence[Arm], baseline_mode: str) -> dict[str, Any]:
    base = baseline_of(arm, arms, baseline_mode)
    partner = next((one for one, other in paired(base, arm) if other is run), None) if base else None
    miou, reference = (
        number(run.metrics, "val_miou"),
        number(partner.metrics, "val_miou") if partner else None,
    )
    return {
        "dir": run.name,
        "mode": run.mode,
        "seed": run.seed,
        "status": run.status,
        "peak_bytes": run.peak_bytes,
        "samples_per_second": run.samples_per_second,
        "val_miou": miou,
        "arm": arm.label,
        "strategy": run.strategy,
        "devices": run.devices,
        "val_loss": number(run.metrics, "val_loss"),
        "peak_ratio": _ratio(run.peak_bytes, partner.peak_bytes) if partner else None,
        "slowdown": _ratio(partner.samples_per_second, run.samples_per_second) if partner else None,
        "miou_delta": miou - reference if miou is not None and reference is not None else None,
        "error": run.error,
    }


def _mode_row(arm: Arm, base: Arm | None, margin: float) -> dict[str, Any]:
    pairs = paired(base, arm) if base else []
    peaks = [ratio for one, other in pairs if (ratio := _ratio(other.peak_bytes, one.peak_bytes)) is not None]
    slow = [
        ratio
        for one, other in pairs
        if (ratio := _ratio(one.samples_per_second, other.samples_per_second)) is not None
    ]
    parity = _parity(arm, base, margin)
    speed = arm.median(lambda run: run.samples_per_second)
    return {
        "mode": arm.mode,
        "runs": len(arm.runs),
        "peak_ratio": statistics.median(peaks) if peaks else None,
        "slowdown": statistics.median(slow) if slow else None,
        "miou_delta_max": parity.largest,
        "parity": parity.verdict,
        "label": arm.label,
        "strategy": arm.strategy,
        "devices": arm.devices,
        "settings": dict(arm.settings),
        "completed": len(arm.completed),
        "statuses": dict(sorted(Counter(run.status for run in arm.runs).items())),
        "out_of_memory": any(run.status == "out_of_memory" for run in arm.runs),
        "peak_bytes": arm.median(lambda run: run.peak_bytes),
        "samples_per_second": speed,
        "samples_per_second_per_device": None if speed is None else speed / arm.devices,
        "peak_ratio_at_most": None if peaks else _bound(arm, base),
        "slowdown_range": [min(slow), max(slow)] if slow else None,
        "pairs": parity.pairs,
        "miou_delta_mean": parity.mean,
        "miou_interval": list(parity.interval) if parity.interval else None,
        "seeds_needed": parity.seeds_needed,
        "parity_words": parity.words,
        "device_name": next((run.device_name for run in arm.runs if run.device_name), ""),
        "device_bytes": next(
            (b for run in arm.runs if (b := number(run.card, "device", "memory_bytes"))), None
        ),
    }


def _parity(arm: Arm, base: Arm | None, margin: float) -> Parity:
    if base is None:
        return Parity("inconclusive", "there is no baseline run of the same strategy and device count", 0)
    if base is arm:
        miou = any(number(run.metrics, "val_miou") is not None for run in arm.completed)
        count = len(arm.completed)
        if not count:
            return Parity("inconclusive", "the baseline itself was not completed", 0)
        return Parity("exact", "the baseline itself", count, *((0.0, 0.0) if miou else (None, None)))
    if not base.completed:
        state = (
            "ran out of memory"
            if any(run.status == "out_of_memory" for run in base.runs)
            else "did not complete"
        )
        return Parity("inconclusive", f"the baseline {state}: nothing to compare", 0)
    quiet = all(_noise_free(run) for run in [*arm.completed, *base.completed])
    here = {key: run.metrics for key, run in base.keys.items()}
    there = {key: run.metrics for key, run in arm.keys.items()}
    return judge_parity(here, there, margin=margin, noise_free=quiet)


def _noise_free(run: Run) -> bool:
    """Whether the run promises equality to the bit: 32-bit on a CPU."""
    precision = str(run.card.get("precision"))
    return lookup(run.card, "memory", "peak_source") == "cpu_allocator" and precision in (
        "32",
        "32-true",
        "fp32",
    )


def _bound(arm: Arm, base: Arm | None) -> float | None:
    """Upper bound of the peak ratio where the baseline ran out of memory: it needs more than it reached."""
    if base is None or base.completed:
        return None
    reached = [run.peak_bytes for run in base.runs if run.status == "out_of_memory" and run.peak_bytes]
    peak = arm.median(lambda run: run.peak_bytes)
    return peak / max(reached) if reached and peak else None


def _ratio(value: float | None, reference: float | None) -> float | None:
    if value is None or not reference:
        return None
    ratio = value / reference
    return ratio if math.isfinite(ratio) else None


def _notes(arms: Sequence[Arm], baseline_mode: str) -> list[str]:
    """What a reader has to know before believing the comparison."""
    notes = []
    if not any(arm.mode == baseline_mode for arm in arms):
        notes.append(
            f"There is no run of the baseline mode `{baseline_mode}`: ratios and parity cannot be told."
        )
    for arm in arms:
        for status, spoken in _STATUS_WORDS.items():
            errors = [run.error for run in arm.runs if run.status == status]
            if errors:
                told = next((f": {shorten(error)}" for error in errors if error), "")
                notes.append(f"`{arm.label}`: {len(errors)} of {len(arm.runs)} runs {spoken}{told}.")
        base = baseline_of(arm, arms, baseline_mode)
        if base is None or base is arm or not arm.completed or not base.completed:
            continue
        pairs = paired(base, arm)
        differing: dict[str, str] = {}
        for one, other in pairs:
            for text in differing_keys(one, other):
                differing.setdefault(text.split(" ", 1)[0], text)
        if differing:
            shown = list(differing.values())[:_MOST_DIFFERENCES]
            more = len(differing) - len(shown)
            listed = ", ".join(shown) + (f" and {more} more" if more else "")
            notes.append(f"`{base.label}` and `{arm.label}` differ in more than the mode: {listed}.")
    return notes


_STATUS_WORDS: Mapping[str, str] = {
    "out_of_memory": "ran out of memory",
    "failed": "failed",
    "interrupted": "were interrupted",
}
