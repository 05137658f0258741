"""Offload: a recomputed segment's inputs wait for backward in host memory.

On CUDA the copies run on a stream of their own, from and to pinned memory, beside the computation. On the CPU
they are plain copies through the same code.
"""

import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seg4k.activation_checkpointing.guards import Saved, changed_after, hooks_in_force, version

SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay where they are: a copy costs more than they do."""

_streams: dict[torch.device, torch.cuda.Stream] = {}


class HostCopy:
    """A tensor in host memory, and how to have it back on its device."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.ready: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self.host = tensor.detach().clone()
            return
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        side = _stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            self.host.copy_(tensor, non_blocking=True)
            self.ready = torch.cuda.Event()
            self.ready.record(side)
        tensor.record_stream(side)  # its memory may be reused only once the copy is done

    def back(self) -> Tensor:
        """The tensor on its device, ready for the current stream."""
        if self.ready is None:
            return self.host
        current = torch.cuda.current_stream(self.device)
        side = _stream(self.device)
        side.wait_event(self.ready)
        with torch.cuda.stream(side):
            tensor = torch.empty_like(self.host, device=self.device, pin_memory=False)
            tensor.copy_(self.host, non_blocking=True)
        current.wait_stream(side)
        tensor.record_stream(current)
        return tensor


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _worth_moving(tensor: Tensor) -> bool:
    # A copy of a tensor with gaps has none: recomputation could choose another kernel and differ.
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    large = tensor.numel() * tensor.element_size() >= SMALLEST_BYTES
    return dense and large and not isinstance(tensor, torch.nn.Parameter)


# A tensor that bounds several segments (a skip) is copied once: the copy is found again while the graph of any
# of them holds it, and while the tensor is still what was copied.
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def host_copy(tensor: Tensor) -> HostCopy:
    """A copy of a tensor in host memory, shared with whoever else asked for it."""
    known = _copies.get(tensor)
    if known is not None:
        then, reference = known
        copy = reference()
        if copy is not None and then == version(tensor):
            return cast(HostCopy, copy)
    copy = HostCopy(tensor)
    _copies[tensor] = (version(tensor), weakref.ref(copy))
    return copy


class OffloadedBoundary(torch.autograd.graph.saved_tensors_hooks):
    """As `BoundaryGuard`, for a segment whose inputs wait in host memory.

    Inside an outer segment that is recomputed, its inputs are the outer segment's to recompute, and nothing is
    copied.
    """

    def __init__(self, segment: str, inputs: int) -> None:
        count = 0

        def pack(tensor: Tensor) -> Saved:
            nonlocal count
            count += 1
            if not _worth_moving(tensor):
                return Saved(tensor.detach(), version(tensor), count)
            copy = host_copy(tensor)
            # The copy would be right even so, but a change while the side stream reads would not.
            return Saved((copy, weakref.ref(tensor)), version(tensor), count)

        def unpack(saved: Saved) -> Tensor:
            if isinstance(saved.payload, Tensor):
                tensor: Tensor | None = saved.payload
                result = saved.payload
            else:
                copy, reference = cast(tuple[HostCopy, Any], saved.payload)
                tensor, result = reference(), copy.back()
            if tensor is not None and version(tensor) != saved.version:
                raise changed_after(segment, saved.index, inputs)
            return result

        super().__init__(pack, unpack)


def boundary_of(segment: str, inputs: int) -> torch.autograd.graph.saved_tensors_hooks | None:
    """The offloading hooks for a segment, or None where outer hooks hold its inputs already."""
    return OffloadedBoundary(segment, inputs) if hooks_in_force() is None else None
