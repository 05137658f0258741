"""A training step as the trace needs it: the model, what is computed on it, and how often."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from seg4k.errors import UserError

__all__ = ["Step", "autocast", "faked"]

Batch = Mapping[str, Any]
_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Step:
    """One training step, described so that it can run on fake tensors as well as on real ones.

    Attributes:
        model: with `segments()`; in training mode; on any device, "meta" too.
        loss: (model, batch) to the scalar that backward starts from; runs the forward pass itself.
        optimizer: from the model to its optimizer; called after the parameters have been made.
        batch: name to (shape, dtype) of each tensor of a batch on the device.
        precision: "fp32", "bf16" or "fp16": autocast's, with weights in fp32.
        modules: other modules with tensors that `loss` uses (class weights, a teacher).
        accumulate: batches to an optimizer step.
        clip: largest gradient norm; None for no clipping.
        zero_grad: where gradients are let go: "before_backward" as Lightning does, so that those of the step
            before are alive during forward, or "after_step".
        copies: further copies of the weights held on the device (1 for a running average).
        is_first: whether it is the first step, in which the optimizer's state comes into being at the end.
        processes: how many train together, one per device.
        shard: shards the model over a mesh of them by FSDP2; None where each holds all of it.
        buckets: whether gradients are exchanged in buckets of DDP, of which they are views.
        state_on_host: whether parameters, gradients and optimizer state lie in host memory.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    precision: str = "bf16"
    modules: tuple[nn.Module, ...] = ()
    accumulate: int = 1
    clip: float | None = None
    zero_grad: str = "before_backward"
    copies: int = 0
    is_first: bool = False
    processes: int = 1
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None
    buckets: bool = False
    state_on_host: bool = False

    def __post_init__(self) -> None:
        if self.precision not in _PRECISIONS:
            raise UserError(f"precision={self.precision}: choose one of {', '.join(_PRECISIONS)}")
        assert self.zero_grad in ("before_backward", "after_step")
        assert self.accumulate >= 1

    def make_batch(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """A batch of zeros."""
        return {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self.batch.items()
        }


def autocast(precision: str, device: str = "cpu") -> AbstractContextManager[object]:
    """Autocast as Lightning's mixed precision enters it: without a cache of cast weights."""
    dtype = _PRECISIONS[precision]
    return nullcontext() if dtype is None else torch.autocast(device, dtype, cache_enabled=False)


def faked(modules: tuple[nn.Module, ...]) -> None:
    """Replace every parameter and buffer by a fresh CPU tensor of its shape, in place.

    Under FakeTensorMode they are fake and take no memory. Models cannot in general be *built* under that
    mode, so they are built first, on the CPU or on "meta". A parameter that several modules share stays
    shared.
    """
    made: dict[int, torch.Tensor] = {}
    old: list[torch.Tensor] = []  # keeps ids from being used twice

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            old.append(tensor)
            fresh = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", requires_grad=False
            )
            if isinstance(tensor, nn.Parameter):
                fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
            made[id(tensor)] = fresh
        return made[id(tensor)]

    for module in modules:
        for part in module.modules():
            for table in (part._parameters, part._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = replace(tensor)  # type: ignore[assignment]
