"""What a plan costs, as plan.json, as a table and as a picture of live memory over the step."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from seg4k.activation_checkpointing.plan import Policy
from seg4k.activation_checkpointing.segments import members
from seg4k.files import atomic_path
from seg4k.memory.auto import PlannedStep
from seg4k.memory.budget import Budget
from seg4k.memory.costs import added_seconds
from seg4k.memory.problem import outermost
from seg4k.memory.readable import GIB, gib, tera
from seg4k.memory.traced import Trace

__all__ = ["plan_report", "print_report", "save_picture"]

_KINDS = {"optimizer": "optimizer state"}


def _rows(step: PlannedStep, names: Iterable[str]) -> list[str]:
    """The segments to tell of: the outermost ones, or their parts where the plan tells these apart."""
    names = list(names)
    named = {member for name in step.plan for member in members(name)}

    def open_up(name: str) -> list[str]:
        inside = [other for other in names if other.startswith(f"{name}.")]
        if name in named or not any(other in named for other in inside):
            return [name]
        return [row for part in outermost(inside) for row in open_up(part)]

    return [row for top in outermost(names) for row in open_up(top)]


def plan_report(
    step: PlannedStep, baseline: PlannedStep, budget: Budget, segment_names: Iterable[str]
) -> dict[str, Any]:
    """The content of plan.json.

    Args:
        step: the plan and its trace.
        baseline: the same step with nothing recomputed.
        budget: bytes that tensors may take, on what device.
        segment_names: of the model, in forward order.
    """
    trace, base, device = step.trace, baseline.trace, budget.device
    segments = []
    for name in _rows(step, segment_names):
        recompute = trace.segments[name].flops("recompute") - base.segments[name].flops("recompute")
        seconds = added_seconds(trace, name, device) - added_seconds(base, name, device)
        policy = step.plan.policy(name)
        segments.append(
            {
                "name": name,
                "policy": policy.value,
                "saved_bytes": trace.segments[name].saved_bytes,
                "recompute_flops": recompute,
                "recompute_seconds": seconds,
            }
        )
    return {
        "schema": 1,
        "feasible": trace.peak_bytes <= budget.bytes,
        "budget_bytes": budget.bytes,
        "device": {"name": device.name, "memory_bytes": device.memory_bytes},
        "baseline": {
            "peak_bytes": base.peak_bytes,
            "flops": base.flops(),
            "step_seconds": baseline.seconds,
        },
        "predicted": {
            "peak_bytes": trace.peak_bytes,
            "peak_at": trace.peak_at,
            "static_bytes": trace.static_bytes,
            "flops": trace.flops(),
            "step_seconds": step.seconds,
            "slowdown": step.seconds / baseline.seconds,
        },
        "segments": segments,
    }


def print_report(
    report: Mapping[str, Any], trace: Trace, base: Trace, budget: Budget, console: Console | None = None
) -> None:
    """Print a report as tables: the whole step, what its peak is made of, and a row per segment.

    Args:
        report: see `plan_report`.
        trace: of the plan.
        base: the same with nothing recomputed.
        budget: as the report has it.
        console: where to.
    """
    console, device = console or Console(), budget.device
    predicted, baseline = report["predicted"], report["baseline"]
    whole = Table(title=f"one training step on {device.name}", title_justify="left")
    for heading in ("", "plan", "nothing recomputed"):
        whole.add_column(heading, justify="left" if not heading else "right")
    whole.add_row("peak", gib(predicted["peak_bytes"]), gib(baseline["peak_bytes"]))
    whole.add_row("  where", trace.peak_at, base.peak_at)
    for kind, size in trace.peak_kinds.items():
        if size or base.peak_kinds[kind]:
            whole.add_row(f"  {_KINDS.get(kind, kind)}", gib(size), gib(base.peak_kinds[kind]))
    whole.add_row("work", tera(predicted["flops"]), tera(baseline["flops"]))
    whole.add_row(
        "time, from measured segments" if device.measured else "time, estimated",
        f"{predicted['step_seconds']:.3f} s",
        f"{baseline['step_seconds']:.3f} s",
    )
    console.print(whole)
    table = Table(title="segments; with none, nothing is recomputed", title_justify="left")
    for heading in ("segment", "policy", "saved", "with none", "recomputed", "added"):
        table.add_column(heading, justify="left" if heading in ("segment", "policy") else "right")
    for row in report["segments"]:
        kept = row["policy"] == Policy.KEEP
        table.add_row(
            row["name"],
            row["policy"],
            gib(row["saved_bytes"]),
            gib(base.segments[row["name"]].saved_bytes),
            "" if kept else tera(row["recompute_flops"]),
            "" if kept else f"{1000 * row['recompute_seconds']:.1f} ms",
        )
    console.print(table)
    verdict = "fits" if report["feasible"] else "does not fit"
    console.print(
        f"{gib(predicted['peak_bytes'])} {verdict} in the budget of {gib(report['budget_bytes'])}. "
        f"{budget.bound} Of its {gib(device.memory_bytes)}, {gib(device.reserve_bytes)} are set aside for "
        "context, libraries and fragmentation.",
        highlight=False,
        soft_wrap=True,
    )


def save_picture(
    trace: Trace, path: Path | str, *, baseline: Trace | None = None, budget: int | None = None
) -> None:
    """Draw live memory over the step, with the outermost segments marked in forward and backward.

    Every segment has the same width: the abscissa is the order of events, not time. The suffix of `path`
    chooses the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    top = max(*trace.live, *(baseline.live if baseline else [0]), budget or 0) / GIB
    places, bytes_ = _positions(trace)
    if baseline is not None and baseline is not trace:
        width = len(trace.marks) / len(baseline.marks)
        before, bytes_before = _positions(baseline)
        axes.plot([x * width for x in before], bytes_before, color="0.6", lw=1, label="nothing recomputed")
    axes.fill_between(places, bytes_, color="tab:blue", alpha=0.6, lw=0)
    if budget is not None:
        axes.axhline(budget / GIB, color="tab:red", ls="--", lw=1, label="budget")
    colours = {"forward": "tab:green", "backward": "tab:orange", "optimizer": "tab:purple"}
    for index, (_, _, phase) in enumerate(trace.marks):
        axes.axvspan(index, index + 1, ymax=0.02, color=colours[phase], lw=0)
    for phase, colour in colours.items():
        axes.plot([], [], color=colour, lw=6, label=phase)
    axes.set_xticks([index + 0.5 for index in range(len(trace.marks))], [name for _, name, _ in trace.marks])
    axes.tick_params("x", rotation=90, labelsize=7, length=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set(
        xlim=(0, len(trace.marks)),
        ylim=(0, top * 1.15),
        ylabel="live memory, GiB",
        title=f"peak {gib(trace.peak_bytes)} in {trace.peak_at}",
    )
    axes.legend(loc="upper center", ncols=5, fontsize=8)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _positions(trace: Trace) -> tuple[list[float], list[float]]:
    """Abscissae that give each stretch between two marks a width of 1, and live memory in GiB."""
    starts = [start for start, _, _ in trace.marks]
    ends = [*starts[1:], len(trace.live)]
    places = [
        index + (at - start) / (end - start)
        for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        for at in range(start, end)
    ]
    return places, [value / GIB for value in trace.live]
