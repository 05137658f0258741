"""seg4k beside what people use today, on the same work, measured on the CPU.

python benchmarks/peers.py --out benchmarks/results/peers_cpu.json     ViT-S/16 + U-Net at 384x384
python benchmarks/peers.py --encoder test_vit --size 64 --repeats 2    seconds

Peak, operations, loss and gradients of each arm come from a process of its own: three AdamW steps. Step times
come from one process in which the arms alternate. An arm that fails is a row that says how.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import traceback
from pathlib import Path

import torch

STEPS = 4


def batch_of(work):
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(
        256, (work.batch, 3, work.height, work.width), dtype=torch.uint8, generator=generator
    )
    mask = torch.randint(work.classes, (work.batch, work.height, work.width), generator=generator)
    return image, mask


def digest(tensor):
    return hashlib.sha256(tensor.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def measure(arm_name, work, plan, backend):
    """One arm in this process: peak, operations, losses, what became of gradients and buffers."""
    from peer_models import ARMS, build, loss_of, plain_parameter

    from seg4k.activation_checkpointing import Plan, describe_checkpointing
    from seg4k.activation_checkpointing.flops import FlopCount
    from seg4k.activation_checkpointing.selective import AttentionMarker
    from seg4k.memory.ledger import Ledger
    from seg4k.memory.storages import static_bytes

    arm = ARMS[arm_name]
    model = build(arm.kind, work)
    image, mask = batch_of(work)
    options = {"plan": None if plan is None else Plan(plan), "backend": backend}
    net = arm.prepare(model, **options).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    losses = []

    def step():
        optimizer.zero_grad()
        loss = loss_of(net, image, mask)
        loss.backward()
        losses.append(loss.item())

    step()
    gradients = {
        plain_parameter(name): None if p.grad is None else [digest(p.grad), float(p.grad.norm())]
        for name, p in net.named_parameters()
    }
    buffers = {plain_parameter(name): digest(buffer) for name, buffer in net.named_buffers()}
    optimizer.step()
    marker = AttentionMarker()
    with marker, FlopCount(marker) as flops:
        step()
    optimizer.step()
    ledger = Ledger("cpu", [net, optimizer, image, mask])
    ledger.start()
    for _ in range(STEPS - 2):
        step()
        optimizer.step()
    peak = ledger.stop().peak_bytes
    regions = describe_checkpointing(net, image) if arm.traceable else None
    return {
        "peak_bytes": peak,
        "static_bytes": static_bytes([net], [optimizer]),
        "flops": flops.total,
        "losses": losses,
        "gradients": gradients,
        "buffers": buffers,
        "granularity": None if regions is None else regions.counts,
    }


def plan_for_auto(work, share):
    """The plan of mode auto, and its budget: the least that is possible and a share of what can be saved."""
    from peer_models import seg4k_step

    from seg4k.memory.auto import AutoPlanner
    from seg4k.memory.devices import this_device
    from seg4k.memory.tracer import Tracer

    with Tracer(seg4k_step, work, "fp32", "whole", rules="cpu") as tracer:
        planner = AutoPlanner(tracer, this_device())
        least, most = planner.smallest().trace.peak_bytes, planner.baseline.trace.peak_bytes
        budget = int(least + share * (most - least))
        found = planner.at(budget)
    return {name: policy.value for name, policy in found.plan.items()}, budget, found.trace.peak_bytes


def time_arms(names, work, plan, backend, warmup, repeats):
    """Paired step times of all arms, in this process: one optimizer to a model, which its arms share."""
    from peer_models import ARMS, build, loss_of

    from seg4k.activation_checkpointing import Plan
    from seg4k.studies.speed import interleaved_timing

    models = {kind: build(kind, work) for kind in dict.fromkeys(ARMS[name].kind for name in names)}
    optimizers = {kind: torch.optim.AdamW(model.parameters()) for kind, model in models.items()}
    image, mask = batch_of(work)
    own = {}  # copies that wrap are made once

    def arm(name):
        kind = ARMS[name].kind

        def run():
            net = own.get(name)
            if net is None:
                net = ARMS[name].prepare(
                    models[kind], plan=Plan(plan) if name == "seg4k auto" else None, backend=backend
                )
                if net is not models[kind]:
                    own[name] = net.train()
            loss_of(net, image, mask).backward()
            optimizers[kind].step()
            optimizers[kind].zero_grad(set_to_none=True)

        return run

    return interleaved_timing({name: arm(name) for name in names}, warmup=warmup, repeats=repeats)


def agreement(row, base):
    """How an arm's losses and gradients compare with those of the same model without checkpointing."""
    missing = [name for name, value in row["gradients"].items() if value is None]
    missing = [name for name in missing if base["gradients"].get(name) is not None]
    norms = [
        abs(value[1] - base["gradients"][name][1]) / max(base["gradients"][name][1], 1e-12)
        for name, value in row["gradients"].items()
        if value is not None and base["gradients"].get(name) is not None
    ]
    known = row["gradients"].keys() <= base["gradients"].keys()
    different = [name for name, value in row["buffers"].items() if base["buffers"].get(name, value) != value]
    return {
        "loss_difference": max(abs(a - b) for a, b in zip(row["losses"], base["losses"], strict=True)),
        "gradients_equal": known and row["gradients"] == {n: base["gradients"][n] for n in row["gradients"]},
        "gradient_norms_differ_by": max(norms, default=0.0),
        "gradients_missing": missing,
        "buffers_different": len(different),
    }


def child(task, arguments, timeout):
    """Run a task of this script in a fresh process, and return its answer."""
    from provenance import child_environment

    command = [sys.executable, str(Path(__file__)), "--child", task, json.dumps(arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, env=child_environment()
    )
    for line in reversed(result.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    why = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
    raise RuntimeError(why)


def run_child(task, arguments):
    from peer_models import Work

    work = Work(**arguments.pop("work"))
    try:
        answer = {"measure": measure, "plan": plan_for_auto, "time": time_arms}[task](work=work, **arguments)
        answer = answer if isinstance(answer, dict) else {"answer": answer}
    except Exception as error:
        traceback.print_exc()
        answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print(json.dumps(answer))


def compare(work, *, repeats, warmup, backend, share=0.1, timeout=600, arms=None, timed=True):
    """All arms: a row each, and the budget of auto."""
    from dataclasses import asdict

    from peer_models import ARMS, PLAIN, TRANSFORMERS

    names = list(arms or ARMS)
    settings = {"work": asdict(work)}
    plan, budget, predicted = child("plan", {**settings, "share": share}, timeout)["answer"]
    rows = {}
    for name in names:
        own = plan if name == "seg4k auto" else None
        try:
            found = child("measure", {**settings, "arm_name": name, "plan": own, "backend": backend}, timeout)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"failed": str(error).splitlines()[0]}
        rows[name] = {"baseline": ARMS[name].baseline, **found}
        print(f"peers: {name}: {found.get('failed') or round(found['peak_bytes'] / 2**20)}", file=sys.stderr)
    working = [name for name in names if "failed" not in rows[name]]
    if timed:
        timing = child(
            "time",
            {
                **settings,
                "names": working,
                "plan": plan,
                "backend": backend,
                "warmup": warmup,
                "repeats": repeats,
            },
            max(timeout, 60 * len(working)),
        )
        if "failed" in timing:
            raise RuntimeError(timing["failed"])
        for name in working:
            rows[name] |= timing["arms"][name]
    for name in working:
        row, base = rows[name], rows[rows[name]["baseline"]]
        reference = base if row["gradients"].keys() == base["gradients"].keys() else rows["seg4k none"]
        reference = reference if name not in (PLAIN, TRANSFORMERS) else row
        row |= agreement(row, reference)
        row["loss_difference_to_baseline"] = agreement(row, base)["loss_difference"]
        if timed:  # transformers' arms against their own, in the same rounds
            pairs = zip(row["seconds"], base["seconds"], strict=True)
            row["ratio"] = statistics.median(a / b for a, b in pairs)
        row["peak_ratio"] = row["peak_bytes"] / base["peak_bytes"]
    for name in working:
        del rows[name]["gradients"], rows[name]["buffers"]
    return {"rows": rows, "auto_budget_bytes": budget, "auto_predicted_bytes": predicted, "auto_plan": plan}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", default="vit_small_patch16_224")
    parser.add_argument("--size", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child[0], json.loads(options.child[1]))
        return
    from dataclasses import asdict

    from peer_models import Work
    from provenance import provenance
    from render import peers_table

    from seg4k.files import write_json

    work = Work(encoder=options.encoder, height=options.size, width=options.size)
    config = {
        **asdict(work),
        "repeats": options.repeats,
        "warmup": options.warmup,
        "backend": options.backend,
    }
    found = compare(work, repeats=options.repeats, warmup=options.warmup, backend=options.backend)
    result = {**provenance(config), **found}
    print(peers_table(result))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
