"""seg4k beside what people use today, traced with CUDA's rules: 4K, the limits of a memory, cost per pixel.

python benchmarks/peers_4k.py --out benchmarks/results/peers_4k.json   ViT-B/16 + U-Net, bf16: five minutes
python benchmarks/peers_4k.py --quick                                  a tiny ViT: seconds

Nothing is computed and no GPU is needed: the steps run on fake tensors. Bytes are those held by tensors; what
driver and libraries take comes on top. Times are estimates by the device's roofline, for comparison only.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from peer_models import ARMS, PLAIN, TRANSFORMERS, Work, arm_step, seg4k_step

from seg4k.activation_checkpointing import Plan, make_plan
from seg4k.memory.auto import AutoPlanner
from seg4k.memory.costs import step_seconds
from seg4k.memory.devices import device_from_dict
from seg4k.memory.problem import outermost
from seg4k.memory.trace import trace
from seg4k.memory.tracer import Tracer

GIB = 2**30
BUDGETS = (8, 16, 24)  # GiB
UNIT = (144, 256)  # 16:9 in whole patches; 15 of them are 2160 x 3840
GROWTH = ((512, 512), (1024, 1024), (1080, 1920), (2160, 3840), (4320, 7680))
SHIPPED = "seg4k selective, loss by strips"
AUTO = "seg4k auto for 8 GiB, loss by strips"
LEAST = "seg4k least memory, loss by strips"
FOUR_K = (
    PLAIN,
    "timm set_grad_checkpointing",
    "timm set_grad_checkpointing, reentrant",
    "torch wrapper around each layer",
    "torch wrapper around each part, reentrant",
    TRANSFORMERS,
    "transformers gradient_checkpointing_enable",
    "seg4k none",
    "seg4k stage",
    "seg4k selective",
    SHIPPED,
)
LIMITS = (
    PLAIN,
    "timm set_grad_checkpointing",
    "torch wrapper around each layer",
    "transformers gradient_checkpointing_enable",
    "seg4k stage",
    SHIPPED,
    LEAST,
)
MODES = ("none", "stage", "block", "layer", "selective", "encoder", "decoder")
GROWING = (PLAIN, "timm set_grad_checkpointing", "seg4k stage", SHIPPED)


@dataclass(frozen=True)
class Found:
    """What a trace said."""

    peak_bytes: int
    static_bytes: int
    flops: int
    seconds: float
    peak_at: str


class Traces:
    """Traces of arms at any size, each made once."""

    def __init__(self, work, device, plans):
        self.work, self.device, self.plans = work, device, plans
        self.known = {}

    def at(self, name, **changes):
        """Trace an arm with some of the work changed."""
        work = replace(self.work, **changes)
        if (name, work) not in self.known:
            start = time.perf_counter()
            found = self._trace(name, work)
            self.known[name, work] = Found(
                found.peak_bytes,
                found.static_bytes,
                found.flops(),
                step_seconds(found, self.device),
                found.peak_at,
            )
            peak, took = found.peak_bytes / GIB, time.perf_counter() - start
            size = f"{work.batch} x {work.height}x{work.width}"
            print(f"traced {name}, {size}: {peak:.2f} GiB ({took:.1f} s)", file=sys.stderr)
        return self.known[name, work]

    def _trace(self, name, work):
        if name in self.plans or name == SHIPPED:
            step = seg4k_step(work, "bf16", "strips")
            names = list(step.model.segments())
            return trace(step, self.plans[name] if name in self.plans else make_plan("selective", names))
        return trace(arm_step(name, work, "bf16"))


def planned(work, device, budget):
    """The plans of mode auto for a budget and of the least memory, and how long planning took."""
    start = time.perf_counter()
    with Tracer(seg4k_step, work, "bf16", "strips") as tracer:
        tracer.trace(Plan())
        first = time.perf_counter() - start
        planner = AutoPlanner(tracer, device)
        found = planner.at(budget)
        seconds, traces = time.perf_counter() - start, len(tracer.plans) + 1
        least = planner.smallest()
    # The floor of planning: to start a process, build the model and trace the step once.
    facts = {"seconds": seconds, "traces": traces, "floor_seconds": first}
    return found, least, facts


def largest(peak_at, cost, known, budget):
    """The largest whole number whose traced peak is within a budget, 0 where none is.

    Peaks grow linearly with the cost (images, or pixels), so two known numbers tell where to look; the answer
    itself is traced.
    """
    first, second = known
    slope = (peak_at(second) - peak_at(first)) / (cost(second) - cost(first))
    room = cost(first) + (budget - peak_at(first)) / slope
    number = 0
    while cost(number + 1) <= room:
        number += 1
    while number > 0 and peak_at(number) > budget:
        number -= 1
    return number


def limits(traces, name, budgets):
    """The largest batch at the work's size, and the largest 16:9 image at batch 1, per budget in GiB."""
    unit = round(traces.work.height / UNIT[0])

    def batch_peak(count):
        return traces.at(name, batch=count).peak_bytes

    def image_peak(units):
        return traces.at(name, height=UNIT[0] * units, width=UNIT[1] * units).peak_bytes

    found = {}
    for budget in budgets:
        units = largest(image_peak, lambda units: units**2, (unit, 2 * unit), budget * GIB)
        found[str(budget)] = {
            "batch": largest(batch_peak, lambda count: count, (1, 2), budget * GIB),
            "height": UNIT[0] * units,
            "width": UNIT[1] * units,
        }
    return found


def suite(work, device, budgets=BUDGETS, growth=GROWTH, names=FOUR_K, limited=LIMITS, growing=GROWING):
    """Everything that this script finds, as plain values; a peer that fails is a row that says so."""
    auto, least, planning = planned(work, device, budgets[0] * GIB)
    traces = Traces(work, device, {AUTO: auto.plan if auto else least.plan, LEAST: least.plan})
    rows, seen = {}, {}
    for name in (*names, AUTO, LEAST):
        try:
            rows[name] = asdict(traces.at(name))
        except Exception as error:  # a peer's failure is a finding
            rows[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    for name in ARMS:
        if not ARMS[name].traceable:
            rows[name] = {"failed": "torch.compile does not run on fake tensors: nothing is known beforehand"}
    for name in limited:
        if "failed" not in rows[name]:
            seen[name] = limits(traces, name, budgets)
    per_pixel = {
        name: [{"height": h, "width": w, **asdict(traces.at(name, height=h, width=w))} for h, w in growth]
        for name in growing
        if "failed" not in rows[name]
    }
    parts, floor = anatomy(work)
    return {
        "rows": rows,
        "modes": modes(work, MODES[: len(names)]),
        "anatomy": parts,
        "limits": seen,
        "growth": per_pixel,
        "floor": floor,
        "planning": planning,
        "plans": {AUTO: traces.plans[AUTO].as_list(), LEAST: least.plan.as_list()},
    }


def modes(work, names):
    """What each of seg4k's modes holds and recomputes."""
    rows = {}
    for mode in names:
        step = seg4k_step(work, "bf16", "strips")
        plan = make_plan(mode, list(step.model.segments()))
        found = trace(step, plan)
        rows[mode] = {
            "regions": len(plan),
            "peak_bytes": found.peak_bytes,
            "peak_at": found.peak_at,
            "peak_kinds": found.peak_kinds,
            "flops": found.flops(),
            "recompute_flops": found.flops("recompute"),
        }
    return rows


def anatomy(work):
    """What each segment holds from forward to backward where nothing is recomputed, and the physical limit.

    The limit is what stays from step to step and the activations of the largest segment that no other one
    divides further.
    """
    step = seg4k_step(work, "bf16", "strips")
    names = [*outermost(step.model.segments()), "loss"]
    found = trace(step, Plan())
    held = {name: part.saved_bytes for name, part in found.segments.items()}
    whole = [name for name in held if not any(other.startswith(f"{name}.") for other in held)]
    name = max(whole, key=lambda key: held[key])
    segments = {
        name: {
            "saved_bytes": held[name],
            "flops": found.segments[name].flops("forward"),
            "attention_flops": attention_flops(found, name),
        }
        for name in names
    }
    floor = {
        "static_bytes": found.static_bytes,
        "segment": name,
        "segment_bytes": held[name],
        "peak_bytes": found.static_bytes + held[name],
        "flops": found.flops(),
    }
    return {"segments": segments, "peak_kinds": found.peak_kinds, "peak_at": found.peak_at}, floor


def attention_flops(found, name):
    """Of a segment's forward, what lies in its attention modules (projections too)."""
    inside = [other for other in found.segments if other.startswith(f"{name}.") and other.endswith(".attn")]
    return sum(found.segments[other].flops("forward") for other in inside)


def device_named(name):
    """A device of conf/device."""
    from omegaconf import OmegaConf

    path = Path(__file__).parent.parent / "conf" / "device" / f"{name}.yaml"
    return device_from_dict(OmegaConf.to_container(OmegaConf.load(path)))


def quick():
    """Arguments of `suite` for a run of seconds."""
    work = Work("test_vit", 144, 256, classes=3, channels=(16, 16, 8, 8))
    few = (PLAIN, "timm set_grad_checkpointing", "seg4k selective", SHIPPED)
    growth = ((64, 64), (144, 256))
    return work, {"budgets": (0.06,), "growth": growth, "names": few, "limited": few[:1], "growing": few[:1]}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", default="vit_base_patch16_224")
    parser.add_argument("--device", default="rtx4090", help="whose figures the estimated times are of")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from provenance import provenance
    from render import four_k_tables

    from seg4k.files import write_json

    torch.set_num_threads(1)
    work, more = Work(options.encoder, 2160, 3840), {}
    if options.quick:
        work, more = quick()
    found = suite(work, device_named(options.device), **more)
    config = {**asdict(work), "precision": "bf16", "device": options.device, "quick": options.quick}
    result = {**provenance(config), **found}
    print(four_k_tables(result))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
