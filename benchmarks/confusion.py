"""Times the confusion matrix against torchmetrics' on one 3840x2160 label map of 19 classes, alternating.

python benchmarks/confusion.py [--rounds 7] [--threads 1]
"""

import argparse
import json
import platform
import statistics
import time

import torch
import torchmetrics
from torchmetrics.classification import MulticlassConfusionMatrix

from seg4k.metrics import ConfusionMatrix

HEIGHT, WIDTH, CLASSES = 2160, 3840, 19


def label_maps():
    """A mask of large regions with 5% ignored pixels, and a prediction that is wrong on one pixel in five."""
    generator = torch.Generator().manual_seed(0)
    target = (torch.arange(HEIGHT * WIDTH).view(1, HEIGHT, WIDTH) // 400_000) % CLASSES
    noise = torch.randint(0, CLASSES, target.shape, generator=generator)
    prediction = torch.where(torch.rand(target.shape, generator=generator) < 0.2, noise, target)
    target[torch.rand(target.shape, generator=generator) < 0.05] = 255
    return prediction, target


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    prediction, target = label_maps()
    arms = {
        "seg4k": ConfusionMatrix(CLASSES, 255),
        "torchmetrics": MulticlassConfusionMatrix(CLASSES, ignore_index=255, validate_args=False),
        "torchmetrics, validating": MulticlassConfusionMatrix(CLASSES, ignore_index=255),
    }
    seconds = {name: [] for name in arms}
    for round_ in range(arguments.rounds + 1):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm.update(prediction, target)
            if round_:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    ours = arms["seg4k"].matrix
    for name in ("torchmetrics", "torchmetrics, validating"):
        if not torch.equal(ours, arms[name].confmat):
            raise SystemExit(f"{name} counts differently")

    ratios = {
        name: statistics.median(o / t for o, t in zip(seconds["seg4k"], seconds[name], strict=True))
        for name in arms
    }
    print(
        json.dumps(
            {
                "size": [HEIGHT, WIDTH],
                "classes": CLASSES,
                "threads": arguments.threads,
                "versions": {"torch": torch.__version__, "torchmetrics": torchmetrics.__version__},
                "machine": platform.machine(),
                "median_ms": {name: round(1e3 * statistics.median(s), 1) for name, s in seconds.items()},
                "time_of_seg4k_relative_to": {name: round(ratio, 3) for name, ratio in ratios.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
