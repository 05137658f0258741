"""How long work takes on a device, by its roofline (Williams et al., 2009, doi:10.1145/1498765.1498785).

Each operator takes the longer of its FLOPs at the device's rate and its bytes at the memory's. Real kernels
reach a part of the vendor's peaks; the two factors below bring estimates to a usual size. Plans are
compared by ratios of such estimates, in which the factors nearly cancel.

Where the forward of a segment was measured on the device (`Device.measured`), its estimates are scaled to
agree with that: those of its recomputation, in part or as a whole, and of its backward too.
"""

from collections import Counter

from seg4k.memory.devices import Device
from seg4k.memory.recorder import Operation
from seg4k.memory.traced import Trace

__all__ = ["added_seconds", "segment_seconds", "step_seconds", "work_seconds"]

COMPUTE_EFFICIENCY = 0.6
"""Share of peak FLOP/s that large matrix products and attention reach in training."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of peak bandwidth that elementwise kernels and copies reach."""


def work_seconds(work: Counter[Operation], device: Device) -> float:
    """Seconds of some operators, one after the other."""
    total = 0.0
    bandwidth = device.memory_bandwidth * BANDWIDTH_EFFICIENCY
    for operation, times in work.items():
        computing = operation.flops / (device.flops(operation.dtype) * COMPUTE_EFFICIENCY)
        total += times * max(computing, operation.bytes / bandwidth)
    return total


def segment_seconds(trace: Trace, name: str, device: Device, phase: str) -> float:
    """Seconds of one segment in a phase: "forward", "recompute", "backward" or "optimizer"."""
    rest = Counter(trace.segments[name].work.get(phase, {}))
    total = 0.0
    for inner, measured in device.measured.items():
        if rest and (inner == name or inner.startswith(f"{name}.")):
            work = trace.segments[inner].work
            estimate = work_seconds(work.get("forward", Counter()), device)
            if estimate > 0:
                inside = work.get(phase, Counter())
                total += measured / estimate * work_seconds(inside, device)
                rest.subtract(inside)
    return total + work_seconds(rest, device)


def transfer_seconds(trace: Trace, name: str, device: Device) -> float:
    """Seconds that a segment waits for transfers between device and host.

    On the way out they run beside the segment's own forward; on the way back the recomputation waits for
    them.
    """
    rate = device.host_bandwidth * BANDWIDTH_EFFICIENCY
    moved = trace.segments[name].moved
    beside = segment_seconds(trace, name, device, "forward")
    return max(0.0, moved["forward"] / rate - beside) + moved["backward"] / rate


def step_seconds(trace: Trace, device: Device) -> float:
    """Seconds of one batch, forward and backward, and the optimizer's step."""
    waiting = sum(transfer_seconds(trace, name, device) for name in trace.segments)
    phases = ("forward", "recompute", "backward", "optimizer")
    working = sum(
        segment_seconds(trace, name, device, phase) for name in trace.outermost() for phase in phases
    )
    return working + waiting


def added_seconds(trace: Trace, name: str, device: Device) -> float:
    """Seconds that recomputation and offloading of one segment add to the step."""
    inside = [other for other in trace.segments if other == name or other.startswith(f"{name}.")]
    waiting = sum(transfer_seconds(trace, other, device) for other in inside)
    return segment_seconds(trace, name, device, "recompute") + waiting
