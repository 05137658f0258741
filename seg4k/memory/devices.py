"""What a device can hold and how fast it computes: figures from conf/device, or measured on this machine."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from seg4k.errors import UserError

__all__ = ["Device", "device_from_dict", "this_device"]


@dataclass(frozen=True)
class Device:
    """A device's figures; rates are per second, sizes in bytes.

    Attributes:
        name: as its vendor calls it.
        kind: "cuda" or "cpu": by whose rules a step is traced for it.
        memory_bytes: all of its memory.
        reserve_bytes: what context, libraries and fragmentation take beside tensors.
        bf16_flops: dense peak with fp32 accumulation, FLOP/s; likewise the others.
        fp16_flops: see above.
        fp32_flops: see above.
        memory_bandwidth: bytes/s between the device and its memory.
        host_bandwidth: bytes/s between the device's memory and the host's, in one direction.
        source: where the figures are from.
        measured: seconds that the forward of segments takes on it, by name, as far as they were measured.
    """

    name: str
    kind: str
    memory_bytes: int
    reserve_bytes: int
    bf16_flops: float
    fp16_flops: float
    fp32_flops: float
    memory_bandwidth: float
    host_bandwidth: float
    source: str
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def budget_bytes(self) -> int:
        """What tensors may take: the memory less the reserve."""
        return self.memory_bytes - self.reserve_bytes

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s for operands of `dtype`, e.g. "bfloat16"; fp32's for any other type."""
        return {"bfloat16": self.bf16_flops, "float16": self.fp16_flops}.get(dtype, self.fp32_flops)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_from_dict(values: Mapping[str, Any]) -> Device:
    """Make a `Device` from the mapping that a file of conf/device holds.

    A `memory_bytes` of None stands for the memory of this machine (only for kind "cpu").

    Raises:
        UserError: on missing, unknown or impossible figures.
    """
    where = f"device {values.get('name', '?')!r}"
    names = [entry.name for entry in fields(Device) if entry.name != "measured"]
    unknown, missing = sorted(set(values) - set(names)), [name for name in names if name not in values]
    if unknown or missing:
        raise UserError(
            f"{where}: unknown keys {unknown}, missing keys {missing}. A device needs {', '.join(names)}; "
            "see conf/device/rtx4090.yaml."
        )
    values = dict(values)
    if values["kind"] not in ("cuda", "cpu"):
        raise UserError(f"{where}: kind is {values['kind']!r}; use cuda or cpu.")
    if values["memory_bytes"] is None and values["kind"] == "cpu":
        values["memory_bytes"] = _physical_memory()
    for name in names[2:-1]:
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UserError(f"{where}: {name} is {value!r}; give a number of at least 0.")
        if value == 0 and name != "reserve_bytes":
            raise UserError(f"{where}: {name} is 0; give the figure of the device's datasheet.")
        values[name] = int(value) if name.endswith("_bytes") else float(value)
    if values["reserve_bytes"] >= values["memory_bytes"]:
        raise UserError(f"{where}: reserve_bytes leaves nothing of memory_bytes; lower it.")
    return Device(**values)


def _best_seconds(action: Callable[[], object], device: torch.device, repeats: int = 4) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def this_device(reserve_bytes: int = 1 << 30) -> Device:
    """Measure the machine at hand: its first CUDA device, or else its CPU. Takes about a second."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    side = 8192 if device.type == "cuda" else 1024

    def matmul_rate(dtype: torch.dtype, side: int) -> float:
        matrix = torch.ones(side, side, device=device, dtype=dtype)
        return 2 * side**3 / _best_seconds(lambda: matrix @ matrix, device)

    block = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    target = torch.empty_like(block)
    bandwidth = 2 * block.numel() / _best_seconds(lambda: target.copy_(block), device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
        host = torch.empty(block.shape, dtype=torch.uint8, pin_memory=True)
        link = block.numel() / _best_seconds(lambda: host.copy_(block, non_blocking=True), device)
        half_side = side
    else:
        name, memory, link = f"this CPU, {torch.get_num_threads()} threads", _physical_memory(), bandwidth
        half_side = 256  # some CPUs emulate fp16, a thousand times slower
    return Device(
        name=name,
        kind=device.type,
        memory_bytes=memory,
        reserve_bytes=min(reserve_bytes, memory // 4),
        bf16_flops=matmul_rate(torch.bfloat16, side),
        fp16_flops=matmul_rate(torch.float16, half_side),
        fp32_flops=matmul_rate(torch.float32, side),
        memory_bandwidth=bandwidth,
        host_bandwidth=link,
        source="measured on this machine: matrix products and copies, best of four",
    )
