"""A short number that stands for the content of a tensor.

On the CPU it is exact: any changed bit changes it, but for a chance of about 2^-64. On CUDA, where kernels
may be nondeterministic, it is a few sums that are compared with a tolerance.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_PRIME = 0x9E3779B97F4A7C15
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 20}
"""Elements looked at together, by device: what a fingerprint costs in memory, times 8 bytes and three."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The content of a tensor: `exact` (on the CPU, or of whole numbers), or `sums` (of floats on CUDA)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    exact: int | None
    sums: tuple[float, ...] | None = None
    """Of squares, and four with random weights."""

    def matches(self, other: "Fingerprint") -> bool:
        """Whether both are of the same content, as far as the device can tell."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        if self.sums is None or other.sums is None:
            return self.exact == other.exact
        if not all(map(math.isfinite, (*self.sums, *other.sums))):
            return [math.isfinite(x) for x in self.sums] == [math.isfinite(x) for x in other.sums]
        # Noise in the last places, independent from element to element, shifts a weighted sum by that part of
        # the norm; other content, by about the norm.
        (squares, *weighted), (squares_other, *weighted_other) = self.sums, other.sums
        norm, norm_other = math.sqrt(squares), math.sqrt(squares_other)
        slack = (1e-3 if torch.finfo(self.dtype).eps < 1e-5 else 5e-2) * max(norm, norm_other)
        pairs = zip(weighted, weighted_other, strict=True)
        return abs(norm - norm_other) <= slack / 5 and all(abs(one - two) <= slack for one, two in pairs)


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """The fingerprint of a tensor; None for one without a plain storage (sparse, quantised, fake)."""
    if not can_be_read(tensor):
        return None
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    tensor = tensor.resolve_neg()
    floats = tensor.is_floating_point() and tensor.device.type != "cpu"
    shape, dtype = tuple(tensor.shape), tensor.dtype
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # an expanded dimension repeats itself
            tensor = tensor.narrow(dim, 0, 1)
    if floats:
        return Fingerprint(shape, dtype, None, _sums(tensor))
    exact = 0
    for chunk in _chunks(tensor, CHUNK[tensor.device.type]):
        exact = (exact * _PRIME + _hash(chunk)) & _MASK
    return Fingerprint(shape, dtype, exact)


def can_be_read(tensor: Tensor) -> bool:
    """Whether a tensor has plain values to read, on a device that the fingerprint knows."""
    from torch._subclasses.fake_tensor import FakeTensor

    return (
        tensor.layout is torch.strided
        and tensor.device.type in CHUNK
        and not tensor.is_quantized
        and not isinstance(tensor, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _chunks(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """The elements in logical order, flat and contiguous, `size` at a time, whatever the layout."""
    pieces: list[Tensor] = []
    count = 0
    for piece in _pieces(tensor, size):
        pieces.append(piece)
        count += piece.numel()
        while count >= size:
            flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            yield flat[:size]
            pieces, count = [flat[size:]], count - size
    if count:
        yield torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _pieces(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """The same in pieces of at most `size` elements, as the layout allows."""
    if tensor.numel() <= size:
        yield tensor.reshape(-1).contiguous()
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(size)  # type: ignore[no-untyped-call]
    else:
        rows = size // (tensor.numel() // tensor.shape[0])
        for part in tensor.split(rows) if rows else tensor:  # type: ignore[no-untyped-call]
            yield from _pieces(part, size)


def _hash(flat: Tensor) -> int:
    """A number below 2^64 for the bytes of a flat contiguous tensor; their order counts."""
    size = flat.numel() * flat.element_size()
    if size == 0:
        return 0
    flat = flat.as_strided(flat.shape, (1,))  # one element may have any stride
    aligned = flat.storage_offset() * flat.element_size() % 8 == 0
    if size % 8 or not aligned:
        padded = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[:size] = flat.view(torch.uint8)
        flat = padded
    words = flat.view(torch.int64)
    # Products wrap around. Folding the high half down keeps flips of top bits from cancelling in the sum.
    mixed = words * _weights(flat.device, 1 << max(0, words.numel() - 1).bit_length())[: words.numel()]
    mixed ^= mixed >> 32
    return (int(mixed.sum()) + size * _PRIME) & _MASK


@cache
def _weights(device: torch.device, count: int) -> Tensor:
    """Odd pseudo-random 64-bit numbers, the same ones always; no generator of torch's is touched."""
    index = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    mixed = index * (_PRIME - (1 << 64))  # splitmix64, in the signed numbers that torch has
    mixed = (mixed ^ ((mixed >> 30) & ((1 << 34) - 1))) * (0xBF58476D1CE4E5B9 - (1 << 64))
    mixed = (mixed ^ ((mixed >> 27) & ((1 << 37) - 1))) * (0x94D049BB133111EB - (1 << 64))
    return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) | 1


def _sums(tensor: Tensor) -> tuple[float, ...]:
    """The sum of squares, and four with weights from -1 to 1 that depend on the place."""
    size = CHUNK["cuda"]
    totals = torch.zeros(5, dtype=torch.float64, device=tensor.device)
    for index, chunk in enumerate(_chunks(tensor, size)):
        values = chunk.double()
        weights = _weights(values.device, size)[: values.numel()]
        sums = [torch.dot(values, values)]
        for shift in (0, 16, 32, 48):
            sums.append(torch.dot(values, (weights << shift).double() / 2.0**63))
        turn = 1.0 + math.sin(index)  # chunks that changed places are not the same
        totals += torch.stack(sums) * totals.new_tensor([1.0, turn, turn, turn, turn])
    return tuple(totals.tolist())


def storage_key(tensor: Tensor) -> Any:  # noqa: ANN401 - an address, or None
    """What identifies the memory under a tensor while it is alive; None where there is none to speak of."""
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:  # of sparse tensors and functorch's wrappers: neither has memory of its own to watch
        return None
