"""Draw the pictures of docs/ from traces of the 4K step.

python benchmarks/pictures.py     a minute: docs/granularity.png and docs/memory_4k.png
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

MODES = ("none", "stage", "block", "layer", "selective")


def curves(traces, path):
    """Live memory of several modes over one step: forward on the left half, backward on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from seg4k.files import atomic_path

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for mode, found in traces.items():
        backward = next(start for start, _, phase in found.marks if phase == "backward")
        end = len(found.live)
        places = [
            index / backward if index < backward else 1 + (index - backward) / (end - backward)
            for index in range(end)
        ]
        axes.plot(places, [value / 2**30 for value in found.live], label=mode, lw=1.2)
    axes.axvline(1, color="0.6", lw=0.8, ls=":")
    axes.set_xticks([0.5, 1.5], ["forward", "backward and optimizer"])
    axes.tick_params("x", length=0)
    axes.set(xlim=(0, 2), ylim=(0, None), ylabel="live memory, GiB")
    axes.legend(title="mode", loc="upper right")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args()
    from peer_models import Work, seg4k_step
    from peers_4k import GIB, device_named, planned, quick

    from seg4k.activation_checkpointing import make_plan
    from seg4k.memory.report import save_picture
    from seg4k.memory.trace import trace

    work = quick()[0] if options.quick else Work(height=2160, width=3840)
    traces = {}
    for mode in MODES:
        step = seg4k_step(work, "bf16", "strips")
        traces[mode] = trace(step, make_plan(mode, list(step.model.segments())))
    curves(traces, options.out / "granularity.png")
    auto, least, _ = planned(work, device_named("rtx4090"), 8 * GIB)
    found = (auto or least).trace
    save_picture(found, options.out / "memory_4k.png", baseline=traces["none"], budget=8 * GIB)


if __name__ == "__main__":
    main()
