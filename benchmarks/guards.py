"""What the guards of every step and the audit of the first step cost, the arms alternating.

python benchmarks/guards.py                    ViT-B/16 at 512x512, fp32, CPU: a few minutes on two cores
python benchmarks/guards.py --size 128 --repeats 3 --encoder vit_tiny_patch16_224

The floor is `torch.utils.checkpoint` around the very same segments and nothing else.
"""

import argparse
import datetime
import functools
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from seg4k.activation_checkpointing import (
    apply_activation_checkpointing,
    make_plan,
    remove_activation_checkpointing,
)
from seg4k.files import write_json
from seg4k.models.vit_unet import build_model
from seg4k.studies.speed import interleaved_timing
from seg4k.training.run_card import code_state, device_state, environment

CLASSES = 19


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--encoder", default="vit_base_patch16_224")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--mode", default="stage")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    size = (arguments.size, arguments.size)
    config = {
        "encoder": {"name": arguments.encoder, "weights": "random"},
        "decoder": {"channels": [256, 128, 64, 32], "norm": "batch"},
        "head": {"stride": 1},
    }
    model = build_model(config, num_classes=CLASSES, image_size=size).train()
    image, mask = torch.rand(1, 3, *size), torch.randint(0, CLASSES, (1, *size))
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
    print(f"{arguments.encoder} + U-Net, {size[0]}x{size[1]}, fp32, {torch.get_num_threads()} threads\n")
    print("| arm | step, s | time ratio | quartiles |\n| --- | --- | --- | --- |")
    for name, row in timing["arms"].items():
        first, third = row["ratio_iqr"]
        print(f"| {name} | {row['median_seconds']:.3f} | {row['ratio']:.3f} | {first:.3f} to {third:.3f} |")
    if len(set(losses.values())) > 1:
        raise SystemExit(f"the losses differ: {losses}")
    if arguments.out:
        content = {
            "command": "python benchmarks/guards.py",
            "date": datetime.date.today().isoformat(),
            "encoder": arguments.encoder,
            "image_size": size,
            "mode": arguments.mode,
            "precision": "fp32",
            "threads": torch.get_num_threads(),
            "warmup": arguments.warmup,
            "repeats": arguments.repeats,
            "code": code_state(),
            "environment": environment(),
            "device": device_state("cpu", None, 1),
            "rows": timing["arms"],
        }
        write_json(arguments.out, content)


if __name__ == "__main__":
    main()
