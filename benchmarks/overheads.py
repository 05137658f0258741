"""What seg4k takes beside training, each with its floor: start-up, reading images, validation at 4K.

python benchmarks/overheads.py --out benchmarks/results/overheads.json      four minutes on the CPU

The floor is what nobody can go below on this machine: importing torch and Lightning alone; decoding the files
alone; the forward pass alone; parameters, image and the features that the head takes.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

IMPORTS = {
    "import seg4k": ("import seg4k", "pass"),
    "seg4k --help": ("from seg4k.cli import main; main(['--help'])", "pass"),
    "what training imports": (
        "import seg4k.training.train",
        "import torch, lightning.pytorch, segmentation_models_pytorch, timm",
    ),
}


def seconds_of(code):
    """Of a fresh Python that runs a line."""
    from provenance import child_environment

    environment = child_environment()
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


def start_up(repeats):
    """Seconds from the shell to the end of each line, and of its floor, alternating."""
    rows = {}
    for name, codes in IMPORTS.items():
        taken = [[seconds_of(code) for code in codes] for _ in range(repeats + 1)]
        taken = taken[1:] or taken  # the first round fills the disk's cache
        own, floor = (statistics.median(column) for column in zip(*taken, strict=True))
        rows[name] = {"seconds": own, "floor_seconds": floor}
    return rows


def validation(encoder, height, width, repeats):
    """One image validated as training does it, and the forward pass alone, alternating; and both peaks."""
    from peer_models import Work, seg4k_model

    from seg4k.losses.build import build_loss
    from seg4k.losses.strips import evaluate_strips
    from seg4k.memory.ledger import measure_cpu_peak
    from seg4k.metrics import ConfusionMatrix

    work = Work(encoder, height, width)
    model = seg4k_model(work).eval()
    loss = build_loss({"terms": {"ce": 1.0}}, work.classes)
    confusion = ConfusionMatrix(work.classes, 255)
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(256, (1, 3, height, width), dtype=torch.uint8, generator=generator)
    mask = torch.randint(work.classes, (1, height, width), generator=generator)

    @torch.no_grad()
    def validate():
        features = model.forward_features(image)
        labels, _ = evaluate_strips(features, model.head, mask, loss)
        confusion.update(labels, mask)

    @torch.no_grad()
    def forward():
        model.head(model.forward_features(image))

    seconds = {"validate": [], "forward": []}
    for _ in range(repeats):
        for name, call in (("validate", validate), ("forward", forward)):
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    roots = [model, image, mask]
    peak = measure_cpu_peak(validate, steps=1, warmup=0, roots=roots)
    whole = measure_cpu_peak(forward, steps=1, warmup=0, roots=roots)
    parameters = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    features = 4 * work.channels[-1] * height * width  # what the head takes, fp32
    return {
        "encoder": encoder,
        "height": height,
        "width": width,
        "seconds": statistics.median(seconds["validate"]),
        "floor_seconds": statistics.median(seconds["forward"]),
        "peak_bytes": peak,
        "forward_peak_bytes": whole,
        "floor_bytes": parameters + sum(t.numel() * t.element_size() for t in (image, mask)) + features,
    }


def reading(**more):
    """What `benchmarks/input.py` finds, on pairs that are made for it."""
    from input import throughput

    with tempfile.TemporaryDirectory() as scratch:
        return throughput(Path(scratch), **more)


def suite(quick=False, repeats=2):
    """Everything that this script finds, as plain values."""
    if quick:
        return {
            "start_up": start_up(0),
            "input": reading(pairs=2, rounds=1, height=128, width=192),
            "validation": validation("test_vit", 96, 128, 1),
        }
    return {
        "start_up": start_up(repeats),
        "input": reading(),
        "validation": validation("test_vit", 2160, 3840, repeats),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from provenance import provenance
    from render import overheads_table

    from seg4k.files import write_json

    result = {**provenance({"quick": options.quick}), **suite(options.quick)}
    print(overheads_table(result))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
