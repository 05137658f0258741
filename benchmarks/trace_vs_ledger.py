"""Hold the traced peak of a training step against the measured one.

    python benchmarks/trace_vs_ledger.py                               # ViT-Tiny, CPU, about 25 minutes
    python benchmarks/trace_vs_ledger.py --encoder vit_base_patch16_224 --sizes 256 384
    python benchmarks/trace_vs_ledger.py --device cuda --sizes 1080x1920 --encoder vit_base_patch16_224

The trace runs on fake tensors and counts storages; the ledger asks the allocator. They share no mechanism.
Each run is a fresh process, the measured one a true step: forward, loss, backward, AdamW. With --out, runs
that the file holds are not made again, and each is kept as soon as it is made.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

MODES = ("none", "stage", "block", "layer", "encoder", "decoder", "selective")
LOSSES = {"ce": {"ce": 1.0}, "ce_dice": {"ce": 1.0, "dice": 1.0}}


def forward(loss, strips, model, batch):
    from seg4k.losses.strips import strip_loss

    features = model.forward_features(batch["image"])
    return strip_loss(features, model.head, batch["mask"], loss, strips, upsample=model.head_stride)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def build(encoder, size, precision, loss, strips, device):
    from seg4k.losses.build import build_loss
    from seg4k.memory.step import Step
    from seg4k.models.vit_unet import build_model

    model = {
        "in_channels": 3,
        "encoder": {"name": encoder, "weights": "random", "frozen": 0},
        "decoder": {"channels": (256, 128, 64, 32), "norm": "batch"},
        "head": {"stride": 1},
    }
    with torch.device(device):
        model = build_model(model, num_classes=19, image_size=size)
    criterion = build_loss({"terms": LOSSES[loss]}, 19).to(device)
    shapes = {"image": ((1, 3, *size), torch.uint8), "mask": ((1, *size), torch.int64)}
    return Step(model, partial(forward, criterion, strips), adamw, shapes, precision, modules=(criterion,))


def measure(arguments):
    """The peak that the allocator saw, in bytes."""
    from seg4k.activation_checkpointing.apply import apply_activation_checkpointing
    from seg4k.activation_checkpointing.modes import make_plan
    from seg4k.memory.ledger import Ledger
    from seg4k.memory.step import autocast

    device = arguments["device"]
    step = build(**arguments["step"], device=device)
    model = step.model.train()
    apply_activation_checkpointing(model, make_plan(arguments["mode"], list(model.segments())), audit="off")
    optimizer, batch = step.optimizer(model), step.make_batch(device)

    def once():
        with autocast(step.precision, device):
            loss = step.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    ledger = Ledger(device, [model, optimizer, batch, *step.modules])
    once()
    ledger.reset()
    ledger.start()
    once()
    once()
    return ledger.stop().peak_bytes


def traced(arguments):
    """The traced peak in bytes, and what of it the CPU's library holds."""
    from seg4k.activation_checkpointing.modes import make_plan
    from seg4k.memory.trace import trace

    step = build(**arguments["step"], device="meta")
    plan = make_plan(arguments["mode"], list(step.model.segments()))
    found = trace(step, plan, rules="cpu" if arguments["device"] == "cpu" else "cuda")
    return found.peak_bytes, found.peak_at, found.peak_kinds["library"]


def child(what, arguments):
    start = time.perf_counter()
    command = [sys.executable, __file__, "--child", what, json.dumps(arguments)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1]), time.perf_counter() - start


def summary(rows):
    """The extremes of the signed ratios, for runs of any size and for those of 1 GiB and more."""
    found = {}
    for precision in sorted({row["precision"] for row in rows}):
        own = [row for row in rows if row["precision"] == precision]
        ratios = [row["ratio"] for row in own]
        found[precision] = {"runs": len(ratios), "lowest": min(ratios), "highest": max(ratios)}
        large = [row["ratio"] for row in own if row["measured_bytes"] >= 1 << 30]
        if large:
            found[precision] |= {"runs_from_1GiB": len(large), "lowest_from_1GiB": min(large)}
            found[precision]["highest_from_1GiB"] = max(large)
    return found


def keep(path, device, rows):
    from provenance import processor, relative

    from seg4k.files import write_json
    from seg4k.training.run_card import code_state, device_state, environment

    commands = []
    if path.exists():
        commands = json.loads(path.read_text(encoding="utf-8"))["commands"]
    command = " ".join(["python", *relative(sys.argv)])
    content = {
        "commands": [*commands, command] if command not in commands else commands,
        "date": datetime.date.today().isoformat(),
        "step": "forward, loss, backward, AdamW; batch 1, 19 classes, decoder 256/128/64/32, random weights",
        "rules": device,
        "device": device_state(device, None, 1),
        "processor": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())),
        "code": code_state(),
        "environment": environment(),
        "summary": summary(rows),
        "runs": rows,
    }
    write_json(path, content)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encoder", default="vit_tiny_patch16_224")
    parser.add_argument("--sizes", nargs="+", default=["256", "384"], help="side, or HEIGHTxWIDTH")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--strips", default="auto", help="auto or a number")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="a JSON file of all runs, these and those it holds already")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, arguments = options.child[0], json.loads(options.child[1])
        arguments["step"]["size"] = tuple(arguments["step"]["size"])
        print(json.dumps({"measure": measure, "trace": traced}[what](arguments)))
        return
    processor = (
        torch.cuda.get_device_name() if options.device == "cuda" else torch.backends.cpu.get_cpu_capability()
    )
    print(f"`{' '.join(['python', *sys.argv])}`  \n{processor}, {torch.get_num_threads()} threads, ", end="")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n")
    head = ("encoder", "size", "precision", "loss", "mode", "measured MiB", "traced MiB", "of it library")
    print("| " + " | ".join([*head, "trace / measured - 1"]) + " |\n" + "| --- " * 9 + "|")
    rows = []
    if options.out and options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["runs"]
    strips = options.strips if options.strips == "auto" else int(options.strips)
    for text in options.sizes:
        sides = [int(side) for side in text.split("x")]
        size = (sides[0], sides[-1])
        for precision in options.precisions:
            for loss in options.losses:
                for mode in options.modes:
                    step = {
                        "encoder": options.encoder,
                        "size": size,
                        "precision": precision,
                        "loss": loss,
                        "strips": strips,
                    }
                    arguments = {"step": step, "mode": mode, "device": options.device}
                    asked = {**step, "size": list(size), "mode": mode}
                    if any(asked.items() <= row.items() for row in rows):
                        continue
                    measured, _ = child("measure", arguments)
                    (peak, place, library), _ = child("trace", arguments)
                    row = {
                        **asked,
                        "measured_bytes": measured,
                        "traced_bytes": peak,
                        "library_bytes": library,
                        "traced_at": place,
                        "ratio": peak / measured - 1,
                    }
                    rows.append(row)
                    if options.out:
                        keep(options.out, options.device, rows)
                    cells = (
                        options.encoder,
                        f"{size[0]}x{size[1]}",
                        precision,
                        loss,
                        mode,
                        f"{measured / 2**20:.1f}",
                        f"{peak / 2**20:.1f}",
                        f"{library / 2**20:.1f}",
                        f"{peak / measured - 1:+.2%}",
                    )
                    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
