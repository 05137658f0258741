"""Measures head + upsampling + loss in one piece and by strips: peak memory, traced, and time on the CPU.

python benchmarks/strips.py trace     peaks at 3840x2160, cross-entropy + Dice, on fake tensors (seconds)
python benchmarks/strips.py time      forward + backward at 1024x1024 x 150 classes on the CPU, alternating
python benchmarks/strips.py agreement largest differences of loss and gradients to one piece (seconds)
"""

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from seg4k.losses.build import build_loss
from seg4k.losses.strips import DEFAULT_STRIP_BYTES, evaluate_strips, strip_loss

FEATURES = 32  # channels of the last decoder block
GIB = 2**30


class Tail(nn.Module):
    """Head and loss as one module: MemTracker follows repeated calls of a module only inside another."""

    def __init__(self, classes, stride):
        super().__init__()
        self.head = nn.Conv2d(FEATURES, classes, 3, padding=1)
        self.loss = build_loss({"terms": {"ce": 1.0, "dice": 1.0}}, classes)
        self.stride = stride

    def forward(self, features, target, strips):
        if torch.is_grad_enabled():
            return strip_loss(features, self.head, target, self.loss, strips, upsample=self.stride)
        return evaluate_strips(features, self.head, target, self.loss, strips, upsample=self.stride)


def traced_peak(classes, stride, strips, size=(2160, 3840), batch=1, validate=False):
    """Bytes at the peak beside features, target and, in training, the gradient of the features."""
    device = torch.device("cpu")
    # Plain convolution shapes; cuDNN and oneDNN may add a workspace, which no trace sees.
    with FakeTensorMode():
        tail = Tail(classes, stride)
        shape = (batch, FEATURES, -(-size[0] // stride), -(-size[1] // stride))
        features = torch.empty(shape, dtype=torch.bfloat16).requires_grad_(not validate)
        target = torch.empty(batch, *size, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(features, target, tail)
        with tracker, torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(not validate):
            result = tail(features, target, strips)
            if not validate:
                result.backward()
        peak = tracker.get_tracker_snapshot("peak")[device]["Total"]
    given = features.numel() * 2 + target.numel() * 8
    return peak - given - (0 if validate else features.numel() * 2)


def trace():
    """Print a table of traced peaks."""
    print(
        "GiB beside features, their gradient and the target; 3840x2160, batch 1, bf16, cross-entropy + Dice"
    )
    print(f"{'classes':>8} {'stride':>7} {'one piece':>10} {'auto':>7} {'validation':>11}")
    for classes in (19, 150):
        for stride in (1, 2, 4):
            whole = traced_peak(classes, stride, 1) if classes * 2160 * 3840 < 2**31 else float("nan")
            auto = traced_peak(classes, stride, "auto")
            validation = traced_peak(classes, stride, "auto", validate=True)
            print(f"{classes:>8} {stride:>7} {whole / GIB:10.3f} {auto / GIB:7.3f} {validation / GIB:11.3f}")


LOSSES = {
    "ce": {"terms": {"ce": 1.0}},
    "ce, smoothed, weighted": {
        "terms": {"ce": 1.0},
        "label_smoothing": 0.1,
        "class_weights": [1.0, 0.3, 2.0, 5.0, 1.0],
    },
    "focal": {"terms": {"focal": 1.0}},
    "dice": {"terms": {"dice": 1.0}},
    "jaccard": {"terms": {"jaccard": 1.0}},
    "tversky": {"terms": {"tversky": 1.0}},
    "ce + dice": {"terms": {"ce": 1.0, "dice": 1.0}},
}
CASES = ("all valid", "some ignored", "all ignored", "class absent")


def masks(size, classes):
    """One target of each case: 20% ignored with whole strips among them, all ignored, class 1 absent."""
    target = torch.randint(0, classes, (2, *size))
    some = target.clone()
    some[torch.rand(target.shape) < 0.2] = 255
    some[:, : size[0] // 5] = 255
    absent = target.clone()
    absent[absent == 1] = 0
    return dict(zip(CASES, (target, some, torch.full_like(target, 255), absent), strict=True))


def agreement():
    """Print the largest relative differences of loss / gradients, fp32, over head strides 1, 2 and 4."""
    torch.manual_seed(0)
    size, classes, few_bytes = (131, 87), 5, 400_000  # odd; "auto" makes several strips of it
    print("loss / gradient: largest relative difference to one piece, fp32, 131x87, head strides 1, 2, 4\n")
    print(f"| loss | strips | {' | '.join(CASES)} |\n|{' --- |' * (2 + len(CASES))}")
    for name, config in LOSSES.items():
        loss = build_loss(config, classes)
        for strips in (1, 2, 7, "auto"):
            cells = []
            for target in masks(size, classes).values():
                worst = [compare(loss, target, strips, stride, classes, few_bytes) for stride in (1, 2, 4)]
                cells.append(" / ".join(f"{max(column):.1e}" for column in zip(*worst, strict=True)))
            print(f"| {name} | {strips} | {' | '.join(cells)} |")


def compare(loss, target, strips, stride, classes, strip_bytes):
    """Relative differences of the loss and of the gradient of features and head to the plain computation.

    The gradient is taken as one vector: the terms of the bias nearly cancel under Dice and its kin, and alone
    it lies up to 1e-5 from float64 either way.
    """
    height, width = target.shape[-2:]
    features = torch.randn(2, FEATURES, -(-height // stride), -(-width // stride)).requires_grad_()
    head = nn.Conv2d(FEATURES, classes, 3, padding=1)
    logits = head(features)
    if stride > 1:
        logits = nn.functional.interpolate(logits, scale_factor=stride, mode="bilinear", align_corners=False)
    wanted = loss(logits[..., :height, :width], target)
    ours = strip_loss(features, head, target, loss, strips, upsample=stride, strip_bytes=strip_bytes)
    inputs = [features, *head.parameters()]
    gradients = [torch.cat([g.flatten() for g in torch.autograd.grad(v, inputs)]) for v in (ours, wanted)]
    return relative_difference(ours, wanted), relative_difference(*gradients)


def relative_difference(value, wanted):
    """Norm of the difference by the norm of what is wanted; 0 where both are 0."""
    difference, norm = (value - wanted).norm().item(), wanted.norm().item()
    return difference / norm if norm else difference


def step_of(strips, stride, classes, size):
    """Return a function that runs one forward and backward pass, in fp32."""
    torch.manual_seed(0)
    tail = Tail(classes, stride)
    features = torch.randn(1, FEATURES, size // stride, size // stride).requires_grad_()
    target = torch.randint(0, classes, (1, size, size))

    def step():
        value = tail(features, target, strips)
        value.backward()
        features.grad = None
        return value

    return step


def measure(arguments):
    """Alternate the arms in this process, then read the peak of each from a process of its own."""
    torch.set_num_threads(arguments.threads)
    names = [1, "auto", *arguments.strips]
    arms = {name: step_of(name, arguments.stride, arguments.classes, arguments.size) for name in names}
    seconds = {name: [] for name in names}
    cpu_seconds = {name: [] for name in names}
    values = {}
    for round_ in range(arguments.rounds + 1):
        for name, step in arms.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            values[name] = step().item()
            if round_:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
                cpu_seconds[name].append(time.process_time() - cpu_start)
    peaks = {}
    for name in names:
        command = [sys.executable, __file__, "peak", "--arm", str(name), "--stride", str(arguments.stride)]
        command += ["--classes", str(arguments.classes), "--size", str(arguments.size)]
        peaks[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "size": arguments.size,
        "classes": arguments.classes,
        "stride": arguments.stride,
        "threads": arguments.threads,
        "strip_bytes": DEFAULT_STRIP_BYTES,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "loss": values,
        "rounds": arguments.rounds,
        "median_seconds": {name: round(statistics.median(s), 3) for name, s in seconds.items()},
        "time_relative_to_one_piece": relative(seconds),
        "cpu_time_relative_to_one_piece": relative(cpu_seconds),  # steadier where the machine is shared
        "peak_bytes_above_inputs": peaks,
    }
    print(json.dumps(report, indent=2))


def relative(seconds):
    """Median over the rounds of each arm's time by that of one piece in the same round."""
    return {
        name: round(statistics.median(a / b for a, b in zip(s, seconds[1], strict=True)), 3)
        for name, s in seconds.items()
    }


def resident(key):
    """Read VmRSS or VmHWM of this process in bytes (Linux)."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def print_peak(arguments):
    """Print how far the largest resident set of one step lies above the resident set before it."""
    torch.set_num_threads(arguments.threads)
    arm = arguments.arm if arguments.arm == "auto" else int(arguments.arm)
    step = step_of(arm, arguments.stride, arguments.classes, arguments.size)
    before = resident("VmRSS")
    step()
    print(resident("VmHWM") - before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["trace", "time", "agreement", "peak"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--classes", type=int, default=150)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--strips", type=int, nargs="*", default=[])
    parser.add_argument("--arm", default="auto", help="for peak: auto or a number of strips")
    arguments = parser.parse_args()
    actions = {"trace": lambda _: trace(), "time": measure, "agreement": lambda _: agreement()}
    (actions | {"peak": print_peak})[arguments.what](arguments)


if __name__ == "__main__":
    main()
