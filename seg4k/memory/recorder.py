"""Watching a step: every storage from its birth to its end, and the work of every operator."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from seg4k.activation_checkpointing.selective import FUSED
from seg4k.memory.storages import own_part

__all__ = ["Operation", "Place", "Record", "Recorder"]

aten = torch.ops.aten
# The CPU's attention operators lack entries in torch's table; the work is that of the other backends.
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
_IGNORED = {torch.ops.prim.device.default, aten.detach.default}


@dataclass(frozen=True)
class Place:
    """Where in a step: a segment's name, or "input", "loss" or "optimizer", and the phase.

    Phases are "forward", "recompute", "backward" and "optimizer".
    """

    name: str
    phase: str

    def __str__(self) -> str:
        phase = "backward" if self.phase == "recompute" else self.phase
        return self.name if self.name == phase else f"{self.name} {phase}"


@dataclass(frozen=True)
class Operation:
    """The work of an operator: FLOPs, bytes read and written, and the type of its operands."""

    flops: int
    bytes: int
    dtype: str


@dataclass
class Record:
    """A storage: its bytes, the moments of its birth and end (None while alive), and what it is.

    `kind` is "parameters", "gradients", "optimizer", "inputs", "gathered", "library", or None for what a step
    computes.
    """

    bytes: int
    born: int
    place: Place
    kind: str | None = None
    freed: int | None = None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records storages and operators while it is the innermost mode.

    A moment is an index into `live`, the bytes alive after each birth or end of a storage.

    Args:
        granularity: storages are counted in multiples of this many bytes.
        library: from (operator, arguments, result) to the bytes that it holds inside; none by default.
    """

    def __init__(self, granularity: int = 1, library: Callable[..., int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.granularity = granularity
        self.library = library
        self.count_operations = False
        self.records: list[Record] = []
        self.live: list[int] = []
        self.marks: list[tuple[int, Place]] = []
        """From which moment on the step is at a place."""
        self.peaks: dict[Place, int] = {}
        self.operations: dict[Place, Counter[Operation]] = {}
        self.attention: list[Record] = []
        """What attention operators made in forward."""
        self.moved: Counter[Place] = Counter()
        """Bytes between device and host, by the place that asked for them."""
        self._place = Place("input", "forward")
        self._now = 0
        self._alive: dict[int, tuple[Any, Record]] = {}
        self._on_host = False

    @property
    def place(self) -> Place:
        """Where the step is."""
        return self._place

    @property
    def moment(self) -> int:
        """The index of the latest birth or end; -1 before the first."""
        return len(self.live) - 1

    def move(self, place: Place) -> None:
        """Say where the step is from now on."""
        self._place = place
        self.marks.append((len(self.live), place))
        self.peaks[place] = max(self.peaks.get(place, 0), self._now)

    def restart(self) -> None:
        """Forget what happened, and keep what is alive."""
        self.records = [record for _, record in self._alive.values()]
        for record in self.records:
            record.born = 0
        self.live, self.marks, self.peaks, self.operations = [self._now], [], {}, {}
        self.attention.clear()
        self.moved.clear()

    def hold(self, tensors: Iterable[torch.Tensor], kind: str, *, on_host: bool = False) -> None:
        """Say what the storages under `tensors` are, and count them, those that lie `on_host` as nothing."""
        for tensor in tensors:
            record = self._record(tensor)
            record.kind = kind
            if on_host:
                self._change(-record.bytes)
                record.bytes = 0

    @contextmanager
    def on_host(self, moved: int) -> Iterator[None]:
        """Leave out what is made meanwhile: it lies in host memory, to or from which `moved` bytes go."""
        self._on_host = True
        try:
            yield
        finally:
            self._on_host = False
        if self.count_operations:
            self.moved[self._place] += moved

    def record_of(self, tensor: torch.Tensor) -> Record:
        """The record of the storage under a tensor."""
        return self._record(tensor)

    def _record(self, tensor: torch.Tensor) -> Record:
        storage = own_part(tensor).untyped_storage()
        key = storage._cdata
        entry = self._alive.get(key)
        if entry is not None:
            return entry[1]
        elsewhere = self._on_host or tensor.device.type != "cpu"
        record = Record(0 if elsewhere else self._size(storage), len(self.live), self._exact_place())
        # The storage's Python object lives as long as the storage itself, also while only C++ holds it.
        self._alive[key] = (weakref.ref(storage, lambda _: self._end(key)), record)
        self.records.append(record)
        self._change(record.bytes)
        return record

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size: it ends, and another one begins in its place.

        So FSDP lets go of gathered parameters and gathers them again.
        """
        entry = self._alive.get(storage._cdata)
        if entry is None:
            return
        reference, before = entry
        before.freed, before.kind = len(self.live), before.kind or "gathered"
        self._change(-before.bytes)
        record = Record(self._size(storage), len(self.live), self._exact_place(), before.kind)
        self._alive[storage._cdata] = (reference, record)
        self.records.append(record)
        self._change(record.bytes)

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self.granularity) * self.granularity

    def _end(self, key: int) -> None:
        _, record = self._alive.pop(key)
        record.freed = len(self.live)
        self._change(-record.bytes)

    def _change(self, size: int) -> None:
        self._now += size
        self.live.append(self._now)
        if self._now > self.peaks.get(self._place, 0):
            self.peaks[self._place] = self._now

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, and note what it made."""
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            # A fake tensor has no value. What steps ask for are counts of steps and flags of overflow.
            return 1 if not args[0].is_floating_point() else 1.0
        out = func(*args, **kwargs)
        if func in _IGNORED:
            return out
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        records = [self._record(tensor) for tensor in made]
        if func in FUSED and self._place.phase == "forward":
            self.attention.extend(records)
        if self.library is not None and (inside := self.library(func, args, out)):
            record = Record(inside, len(self.live), self._exact_place(), "library")
            self._change(inside)
            record.freed = len(self.live)
            self._change(-inside)
            self.records.append(record)
        if self.count_operations and not func.is_view and not self._on_host:
            self._count(func, args, kwargs, out, made)
        return out

    def _count(
        self,
        func: Any,  # noqa: ANN401
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,  # noqa: ANN401
        made: list[torch.Tensor],
    ) -> None:
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        moved = sum(part.numel() * part.element_size() for part in map(own_part, (*taken, *made)))
        formula = _FLOPS.get(func._overloadpacket)
        flops = formula(*args, **kwargs, out_val=out) if formula is not None else 0
        dtype = str((taken or made)[0].dtype).removeprefix("torch.") if taken or made else "float32"
        tally = self.operations.setdefault(self._exact_place(), Counter())
        tally[Operation(int(flops), moved, dtype)] += 1

    def _exact_place(self) -> Place:
        # Backward itself runs without grad mode; recomputation switches it on.
        if self._place.phase == "backward" and torch.is_grad_enabled():
            return Place(self._place.name, "recompute")
        return self._place
