"""One true training step at 3840x2160 on the CPU: ViT-B/16 + U-Net, bf16, AdamW, under mode auto.

python benchmarks/one_step_4k.py --out benchmarks/results/one_step_4k.json     a quarter of an hour, two cores
python benchmarks/one_step_4k.py --compare     none as well, in a process after it: needs 22 GiB of memory
python benchmarks/one_step_4k.py --encoder test_vit --height 64 --width 96 --budget 8MiB --compare    seconds

The step runs in a process of its own, whose largest resident set is read from the kernel: that counts Python,
torch and its libraries beside the tensors. Planning runs on fake tensors in another one. What the budget
leaves of 8 GiB is for the former; where it is too small for any plan, the one of least memory is taken.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

LIMIT = 8 * 2**30


def make_plan_for(work, budget):
    """The plan of mode auto by the CPU's rules; the one of least memory where the budget is too small."""
    from peer_models import first_step

    from seg4k.activation_checkpointing.plan import Policy
    from seg4k.memory.auto import AutoPlanner
    from seg4k.memory.devices import this_device
    from seg4k.memory.tracer import Tracer

    with Tracer(first_step, work, "bf16", "strips", rules="cpu") as tracer:
        # The host's memory is the device's: nothing is gained by offloading.
        planner = AutoPlanner(tracer, this_device(), (Policy.SELECTIVE, Policy.RECOMPUTE))
        found = planner.at(budget) or planner.smallest()
        baseline = planner.baseline.trace
    return found.plan, {
        "predicted_bytes": found.trace.peak_bytes,
        "predicted_flops": found.trace.flops(),
        "none_bytes": baseline.peak_bytes,
        "none_flops": baseline.flops(),
    }


def largest_resident_bytes():
    """VmHWM of this process (Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return 1024 * int(found[1])


def one_step(work, plan):
    """Forward, loss, backward and AdamW, once; loss, gradients' digest, seconds, largest resident set."""
    from peer_models import adamw, seg4k_model, step_of

    from seg4k.activation_checkpointing import Plan, apply_activation_checkpointing
    from seg4k.memory.step import autocast

    model = seg4k_model(work)
    apply_activation_checkpointing(model, Plan(plan), audit="off")
    optimizer = adamw(model)
    step = step_of(model, work, "bf16", "strips")
    generator = torch.Generator().manual_seed(1)
    size = (work.batch, 3, work.height, work.width)
    batch = {
        "image": torch.randint(256, size, dtype=torch.uint8, generator=generator),
        "mask": torch.randint(work.classes, (work.batch, *size[2:]), generator=generator),
    }
    before, start = largest_resident_bytes(), time.perf_counter()
    with autocast("bf16"):
        loss = step.loss(model, batch)
    forward = time.perf_counter() - start
    loss.backward()
    digest, norm = hashlib.sha256(), 0.0
    for parameter in model.parameters():
        digest.update(parameter.grad.numpy().tobytes())
        norm += float(parameter.grad.double().square().sum())
    optimizer.step()
    return {
        "loss": loss.item(),
        "gradient_norm": norm**0.5,
        "gradients": digest.hexdigest()[:16],
        "seconds": time.perf_counter() - start,
        "forward_seconds": forward,
        "rss_before_bytes": before,
        "rss_bytes": largest_resident_bytes(),
    }


def in_fresh_process(work, plan, threads):
    from provenance import child_environment

    command = [sys.executable, __file__, "--child", json.dumps([asdict(work), plan, threads])]
    # Large blocks go back to the system at once, so that what is resident is what is held.
    environment = {**child_environment(), "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", default="vit_base_patch16_224")
    parser.add_argument("--height", type=int, default=2160)
    parser.add_argument("--width", type=int, default=3840)
    parser.add_argument("--budget", default="7.1GiB", help="of mode auto: bytes of tensors")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compare", action="store_true", help="run the step under none too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from peer_models import Work

    if options.child:
        work, plan, threads = json.loads(options.child)
        torch.set_num_threads(threads)
        print(json.dumps(one_step(Work(**work), plan)))
        return
    from provenance import provenance

    from seg4k.files import write_json
    from seg4k.memory.budget import parse_bytes

    work = replace(Work(), encoder=options.encoder, height=options.height, width=options.width)
    plan, promised = make_plan_for(work, parse_bytes(options.budget, "--budget"))
    print(f"planned: {promised['predicted_bytes'] / 2**30:.2f} GiB of tensors", file=sys.stderr, flush=True)
    policies = {name: policy.value for name, policy in plan.items()}
    found = {"auto": in_fresh_process(work, policies, options.threads)}
    print(json.dumps(found["auto"]), file=sys.stderr, flush=True)
    if options.compare:
        try:
            found["none"] = in_fresh_process(work, {}, options.threads)
        except subprocess.CalledProcessError as error:
            found["none"] = {"failed": f"exit status {error.returncode}"}
    equal = None
    if "loss" in found.get("none", {}):
        equal = all(found["auto"][key] == found["none"][key] for key in ("loss", "gradients"))
    result = {
        **provenance({**asdict(work), "precision": "bf16", "budget": options.budget}),
        **promised,
        "plan": plan.as_list(),
        "steps": found,
        "equal_to_none": equal,
        "within_8_gib": found["auto"]["rss_bytes"] < LIMIT,
    }
    if options.out:
        write_json(options.out, result)
    for mode, step in found.items():
        if "failed" in step:
            print(f"{mode}: {step['failed']}")
            continue
        print(
            f"{mode}: loss {step['loss']:.6f}, gradient norm {step['gradient_norm']:.6f}, "
            f"{step['seconds']:.0f} s, largest resident set {step['rss_bytes'] / 2**30:.2f} GiB"
        )
    if equal is not None:
        print(f"loss and every gradient equal to none, bit for bit: {equal}")


if __name__ == "__main__":
    main()
