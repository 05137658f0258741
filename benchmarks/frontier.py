"""Peak memory against added time: every uniform mode, and `auto` at ten budgets. `auto` is never beaten.

    python benchmarks/frontier.py                             # vitb_4k on an RTX 4090, about three minutes
    python benchmarks/frontier.py device=h100 batch.per_device=2

Traced by CUDA's rules, times by the device's roofline; no GPU is needed. Writes docs/frontier.png and a file
in benchmarks/results/. Ends with status 1 where a mode beats `auto`: where at no larger peak it is faster.
"""

import argparse
import datetime
import sys
import time
from pathlib import Path

import numpy as np

from seg4k.activation_checkpointing import Plan, make_plan
from seg4k.files import atomic_path, write_json
from seg4k.memory.auto import AutoPlanner
from seg4k.memory.tracer import Tracer
from seg4k.training.planning import device_of
from seg4k.training.run_card import code_state, environment
from seg4k.training.traced_step import build_step

MODES = ("none", "stage", "block", "layer", "encoder", "decoder", "selective")
GIB = 1 << 30
CLASSES = 19


def configuration(overrides):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from seg4k.cli import conf_directory

    with initialize_config_dir(version_base="1.3", config_dir=str(conf_directory())):
        return OmegaConf.to_container(compose("config", overrides), resolve=True)


def point(step, base):
    return {
        "peak_bytes": step.trace.peak_bytes,
        "peak_at": step.trace.peak_at,
        "step_seconds": step.seconds,
        "added_time": step.seconds / base.seconds - 1,
        "added_flops": step.trace.flops() / base.trace.flops() - 1,
        "policies": {name: policy.value for name, policy in step.plan.items()},
    }


def beaten(auto, modes):
    """Whether a mode with no larger peak is faster than an answer of `auto`."""
    return [
        (answer["budget_bytes"], mode)
        for answer in auto
        for mode, step in modes.items()
        if step["peak_bytes"] <= answer["budget_bytes"] and step["step_seconds"] < answer["step_seconds"]
    ]


def draw(path, content):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    auto = sorted((answer["peak_bytes"] / GIB, 100 * answer["added_time"]) for answer in content["auto"])
    axes.plot(
        *zip(*auto, strict=True), "o-", drawstyle="steps-post", ms=5, label="auto, ten budgets", zorder=3
    )
    for mode, step in content["modes"].items():
        place = step["peak_bytes"] / GIB, 100 * step["added_time"]
        axes.plot(*place, "s", ms=8, color="tab:red", zorder=2)
        # Neighbours' names would run into each other: every other one is below.
        below = list(content["modes"]).index(mode) % 2
        axes.annotate(mode, place, xytext=(7, -13 if below else 5), textcoords="offset points")
    axes.plot([], [], "s", color="tab:red", label="one rule for all segments")
    axes.set(
        xlabel="peak memory of tensors, GiB",
        ylabel="added time of a step, %",
        title=f"{content['title']}\ntraced for {content['device']}",
        xlim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--picture", type=Path, default=Path("docs/frontier.png"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    overrides = ["experiment=vitb_4k", "device=rtx4090", "batch.effective=1", *options.overrides]
    config = configuration(overrides)
    device = device_of(config)
    with Tracer(build_step, config, CLASSES, 3, 255, rules=device.kind) as tracer:
        planner = AutoPlanner(tracer, device)
        base, smallest = planner.planned(Plan()), planner.smallest()
        # The answers first: modes traced before would stand in competition.
        auto = []
        for budget in np.linspace(smallest.trace.peak_bytes, base.trace.peak_bytes, options.budgets):
            auto.append({"budget_bytes": int(budget), **point(planner.at(int(budget)), base)})
        modes = {mode: point(planner.planned(make_plan(mode, tracer.segment_names)), base) for mode in MODES}
        at_peaks = [
            {"budget_bytes": step["peak_bytes"], **point(planner.at(step["peak_bytes"]), base)}
            for step in modes.values()
        ]
        traced = len(tracer.plans)
    height, width = config["data"]["image_size"]
    content = {
        "command": " ".join(["python", "benchmarks/frontier.py", *options.overrides]),
        "overrides": overrides,
        "date": datetime.date.today().isoformat(),
        "title": f"{config['model']['encoder']['name']} + U-Net, {width}x{height}, {config['precision']}, "
        f"{CLASSES} classes, batch {config['batch']['per_device']}",
        "device": device.name,
        "device_source": device.source,
        "rules": device.kind,
        "plans_traced": traced,
        "seconds": time.perf_counter() - started,
        "code": code_state(),
        "environment": environment(),
        "baseline": point(base, base),
        "modes": modes,
        "auto": auto,
        "beaten": beaten(auto + at_peaks, modes),
    }
    print("| plan | budget GiB | peak GiB | added time | added FLOPs |\n| --- | --- | --- | --- | --- |")
    for name, row in (*modes.items(), *(("auto", answer) for answer in auto)):
        budget = f"{row['budget_bytes'] / GIB:.2f}" if "budget_bytes" in row else ""
        print(
            f"| {name} | {budget} | {row['peak_bytes'] / GIB:.2f} | {row['added_time']:+.1%} "
            f"| {row['added_flops']:+.1%} |"
        )
    write_json(options.out or Path("benchmarks/results/frontier.json"), content)
    draw(options.picture, content)
    print(f"{traced} plans traced in {content['seconds']:.0f} s; beaten: {content['beaten'] or 'never'}")
    return 1 if content["beaten"] else 0


if __name__ == "__main__":
    sys.exit(main())
