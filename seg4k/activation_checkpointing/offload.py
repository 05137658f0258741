"""Offload: a recomputed segment's inputs wait for backward in host memory.

On CUDA they are copied to pinned memory on a stream of their own, beside the computation. On the CPU the same
code makes a plain copy.
"""

import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from seg4k.activation_checkpointing.guards import (
    BoundaryGuard,
    Saved,
    changed_after,
    hooks_in_force,
    version,
)
from seg4k.activation_checkpointing.watching import unwatched

SMALLEST_BYTES = 1 << 16
"""Smaller tensors stay where they are: a copy costs more than they do."""

TAKES_HOST_COPIES = "_seg4k_takes_host_copies"
"""Set on a pack hook that wants to be shown host copies, instead of holding what is offloaded itself."""
IS_HOST_COPY = "_seg4k_is_host_copy"
"""Set on the tensors that it is shown."""

_streams: dict[torch.device, torch.cuda.Stream] = {}


class HostCopy:
    """A tensor in host memory, and how to have it back on its device."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.ready: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            side = _stream(tensor.device)
            side.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(side):
                self.host.copy_(tensor, non_blocking=True)
                self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self.ready.record(side)
            tensor.record_stream(side)  # its memory may be reused only once the copy is done
        else:
            self.host = tensor.detach().to("cpu", copy=True)
        setattr(self.host, IS_HOST_COPY, True)

    def back(self) -> Tensor:
        """The tensor on its device, ready for the current stream.

        The stream that is about to recompute copies it: there is nothing to do beside that, and the memory
        comes from the pool that recomputation uses.
        """
        if self.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self.ready)
        return self.host.to(self.device, non_blocking=True)


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


# A tensor that bounds several segments (a skip) is copied once: its copy is found again as long as the graph
# of one of them holds it and the tensor is what was copied.
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def host_copy(tensor: Tensor) -> HostCopy:
    """A copy of a tensor in host memory, shared with whoever else asked for it."""
    then, reference = _copies.get(tensor, (None, None))  # type: ignore[no-untyped-call]
    known: HostCopy | None = reference() if reference is not None else None
    if known is not None and then == version(tensor):
        return known
    with unwatched():
        copy = HostCopy(tensor)
    _copies[tensor] = (version(tensor), weakref.ref(copy))
    return copy


def _worth_moving(tensor: Tensor) -> bool:
    large = tensor.numel() * tensor.element_size() >= SMALLEST_BYTES
    if not large or isinstance(tensor, torch.nn.Parameter):
        return False
    # The copy of a tensor with gaps has none, and every copy begins at an even address: recomputation could
    # choose another kernel, and other bits, for it than for the tensor.
    even = bool(tensor.storage_offset() * tensor.element_size() % 64 == 0)
    return even and torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class OffloadedBoundary(torch.autograd.graph.saved_tensors_hooks):
    """As `BoundaryGuard`, for a segment whose inputs wait in host memory."""

    def __init__(self, segment: str, inputs: int) -> None:
        outer = hooks_in_force()
        position = 0

        def pack(tensor: Tensor) -> Saved:
            nonlocal position
            position += 1
            if not _worth_moving(tensor):
                kept = tensor.detach()
                shown = outer and outer[0](kept)
                return Saved((kept, kept, shown), version(tensor), position)
            copy = host_copy(tensor)
            # The copy is right whatever becomes of the tensor, but a change while the side stream still reads
            # would not be; the tensor is not held for this.
            return Saved(
                (copy, weakref.ref(tensor), outer and outer[0](copy.host)), version(tensor), position
            )

        def unpack(saved: Saved) -> Tensor:
            held, source, _ = cast(tuple[Any, Any, Any], saved.payload)
            tensor: Tensor | None = source if isinstance(source, Tensor) else source()
            if tensor is not None and version(tensor) != saved.version:
                raise changed_after(segment, saved.position, inputs)
            return held.back() if isinstance(held, HostCopy) else cast(Tensor, held)

        super().__init__(pack, unpack)


def boundary_hooks(segment: str, inputs: int, *, offload: bool) -> torch.autograd.graph.saved_tensors_hooks:
    """The hooks around a segment's call.

    Inside an outer segment, its inputs are the outer one's to recompute, and under hooks of others theirs to
    hold: nothing is offloaded there.
    """
    outer = hooks_in_force()
    if offload and (outer is None or hasattr(outer[0], TAKES_HOST_COPIES)):
        return OffloadedBoundary(segment, inputs)
    return BoundaryGuard(segment, inputs)
