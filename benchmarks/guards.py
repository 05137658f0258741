"""What the guards of every step and the audit of the first step cost, the arms alternating.

python benchmarks/guards.py                    ViT-B/16 at 512x512, fp32, CPU: a few minutes on two cores
python benchmarks/guards.py --size 128 --repeats 3 --encoder vit_tiny_patch16_224

The floor is `torch.utils.checkpoint` around the very same segments and nothing else.
"""

import argparse
import functools
from dataclasses import asdict
from pathlib import Path

import torch
from peer_models import Work, seg4k_model
from provenance import provenance
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from seg4k.activation_checkpointing import (
    apply_activation_checkpointing,
    make_plan,
    remove_activation_checkpointing,
)
from seg4k.files import write_json
from seg4k.studies.speed import interleaved_timing


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", default="vit_base_patch16_224")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--mode", default="stage")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    work = Work(arguments.encoder, arguments.size, arguments.size)
    model = seg4k_model(work).train()
    image, mask = (
        torch.rand(1, 3, work.height, work.width),
        torch.randint(work.classes, (1, work.height, work.width)),
    )
    segments = model.segments()
    plan = make_plan(arguments.mode, list(segments))
    losses = {}

    def step(name):
        loss = F.cross_entropy(model(image), mask)
        loss.backward()
        losses[name] = loss.item()
        model.zero_grad(set_to_none=True)

    def bare():
        chosen = [segments[name] for name in plan]
        for segment in chosen:
            segment.forward = functools.partial(checkpoint, segment.forward, use_reentrant=False)
        try:
            step("torch.utils.checkpoint alone")
        finally:
            for segment in chosen:
                del segment.forward

    def ours(audit):
        apply_activation_checkpointing(model, plan, audit=audit)
        try:
            step(f"seg4k, audit={audit}")
        finally:
            remove_activation_checkpointing(model)

    arms = {
        "torch.utils.checkpoint alone": bare,
        "seg4k, audit=off": functools.partial(ours, "off"),
        "seg4k, audit=always": functools.partial(ours, "always"),
    }
    timing = interleaved_timing(arms, warmup=arguments.warmup, repeats=arguments.repeats)
    print(f"{work.encoder} + U-Net, {work.width}x{work.height}, fp32, {torch.get_num_threads()} threads\n")
    print("| arm | step, s | time ratio | quartiles |\n| --- | --- | --- | --- |")
    for name, row in timing["arms"].items():
        first, third = row["ratio_iqr"]
        print(f"| {name} | {row['median_seconds']:.3f} | {row['ratio']:.3f} | {first:.3f} to {third:.3f} |")
    if len(set(losses.values())) > 1:
        raise SystemExit(f"the losses differ: {losses}")
    if arguments.out:
        config = {**asdict(work), "precision": "fp32", "mode": arguments.mode}
        config |= {"warmup": arguments.warmup, "repeats": arguments.repeats}
        write_json(arguments.out, {**provenance(config), "rows": timing["arms"]})


if __name__ == "__main__":
    main()
