"""The measured peak of a run: what the allocator itself saw, never a guess from shapes.

On CUDA the caching allocator counts all the time, and reading its counters is free. The CPU's allocator keeps
no counters; it reports each allocation and release to torch's profiler. So there the ledger opens a window
over a few steps after warm-up, and adds up what was reported:

    ledger = Ledger(device)
    ledger.reset()                      # at the start of the run
    for index, batch in enumerate(batches):
        if index == 3:
            ledger.start()
        ledger.hold(batch)
        training_step(batch)
        if index == 5:
            ledger.stop()
    ledger.reading()
"""

import contextlib
import ctypes
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

from seg4k.memory.storages import held_parts, tensors_in

__all__ = ["Ledger", "Reading", "measure_cpu_peak"]


@dataclass(frozen=True)
class Reading:
    """What a ledger measured.

    Attributes:
        peak_bytes: most bytes held by tensors at one time; None where nothing was measured.
        peak_source: "cuda_allocator" or "cpu_allocator".
        reserved_bytes: most bytes the CUDA allocator took from the driver; None on the CPU.
    """

    peak_bytes: int | None
    peak_source: str
    reserved_bytes: int | None


@dataclass
class _Held:
    """A storage that the profiler's window did not see allocated."""

    pointer: int
    bytes: int
    since: int  # Unix time, ns; 0 for before the window
    freed: list[int] = field(default_factory=list)
    reference: Any = None

    @classmethod
    def watch(cls, storage: torch.UntypedStorage, since: int) -> "_Held":
        held = cls(storage.data_ptr(), storage.nbytes(), since)
        # The profiler gives no event for the release of a block that it did not see allocated; the storage's
        # own end does. The callback must not hold the storage, only the list.
        freed = held.freed
        held.reference = weakref.ref(storage, lambda _: freed.append(time.time_ns()))
        return held


def _every_tensor() -> Iterator[torch.Tensor]:
    gc.collect()
    for thing in gc.get_objects():
        # type() rather than isinstance, which asks lazy proxies for their class and makes them import.
        if issubclass(type(thing), torch.Tensor):
            yield from tensors_in(thing)


def _cpu_storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    seen = set()
    for tensor in chain.from_iterable(map(held_parts, tensors)):
        if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes():
            seen.add(storage._cdata)
            yield storage


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the C++ side from printing while a profiler starts, runs and stops.

    It announces both on stderr, and warns of each thousandth release of a block allocated earlier, which is
    what _Held is for.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read once, when the process starts its first profiler
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another platform's name for it: then the lines appear
        yield
        return
    before = level.value
    level.value = max(before, 2)
    try:
        yield
    finally:
        level.value = before


def _allocations(profiler: profile) -> list[tuple[int, int, int]]:
    """The window's events as (Unix time in ns, address, signed bytes), in order."""
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    found: list[tuple[int, int, int]] = []
    stack = list(results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        fields: Any = event.extra_fields
        if event.tag.name == "Allocation" and fields.device.type == "cpu":
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    # The tree holds events of one instant in no order; a release never precedes what it makes room for.
    return sorted(found, key=lambda entry: (entry[0], entry[2]))


def _peak(held: list[_Held], events: list[tuple[int, int, int]]) -> int:
    """The largest running sum of live bytes, of the events and the storages held beside them."""
    seen_allocated = {pointer for _, pointer, size in events if size > 0}
    timeline: list[tuple[int, int, int]] = list(events)
    for storage in held:
        if storage.since and storage.pointer in seen_allocated:
            continue  # handed over inside the window, and the allocator reported it
        # An address of its own kind: the same block may be released and handed out again within the window.
        timeline.append((storage.since, -1, storage.bytes))
        timeline.extend((when, -1, -storage.bytes) for when in storage.freed)
    timeline.sort(key=lambda entry: (entry[0], entry[2]))
    live: dict[int, int] = {}
    running = peak = 0
    for _, pointer, size in timeline:
        if pointer == -1:
            running += size
        elif size > 0:
            running += size - live.get(pointer, 0)
            live[pointer] = size
        else:
            running -= live.pop(pointer, 0)
        peak = max(peak, running)
    return peak


class Ledger:
    """Measures the peak of a run on one device.

    Args:
        device: where the run computes.
        roots: what to count as alive before a window opens on the CPU: modules, optimizers, batches,
            containers of them. None counts every tensor of the process, as CUDA's allocator does.
    """

    def __init__(self, device: torch.device | str, roots: Iterable[object] | None = None) -> None:
        self.device = torch.device(device)
        self.roots = roots
        self._profiler: profile | None = None
        self._held: list[_Held] = []
        self._peak: int | None = None

    @property
    def on_cuda(self) -> bool:
        """Whether the counters of CUDA's allocator are used."""
        return self.device.type == "cuda"

    @property
    def is_open(self) -> bool:
        """Whether a window is open on the CPU."""
        return self._profiler is not None

    def reset(self) -> None:
        """Forget earlier peaks: called at the start of a run, since a process may make several."""
        self._peak = None
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def start(self) -> None:
        """Open a window on the CPU, between two steps; nothing on CUDA, which counts all the time."""
        if self.on_cuda or self._profiler is not None:
            return
        found = _every_tensor() if self.roots is None else tensors_in(self.roots)
        self._held = [_Held.watch(storage, 0) for storage in _cpu_storages(found)]
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._quiet = _quiet()
        self._quiet.__enter__()
        self._profiler.start()

    def hold(self, batch: object) -> None:
        """Count the tensors of `batch` from now until they are released.

        Needed for what the allocator does not report: tensors from a worker's shared memory or from numpy.
        """
        if self._profiler is not None:
            now = time.time_ns()
            self._held.extend(_Held.watch(storage, now) for storage in _cpu_storages(tensors_in(batch)))

    def stop(self) -> Reading:
        """Close the window, between two steps, and return the largest peak so far."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            try:
                profiler.stop()
            finally:
                self._quiet.__exit__(None, None, None)
            self._peak = max(self._peak or 0, _peak(self._held, _allocations(profiler)))
            self._held = []
        return self.reading()

    def reading(self) -> Reading:
        """The largest peak since `reset`. On the CPU None until a window was closed."""
        if self.on_cuda:
            return Reading(
                torch.cuda.max_memory_allocated(self.device),
                "cuda_allocator",
                torch.cuda.max_memory_reserved(self.device),
            )
        return Reading(self._peak, "cpu_allocator", None)


def measure_cpu_peak(
    step: Callable[[], object], *, steps: int = 2, warmup: int = 1, roots: Iterable[object] | None = None
) -> int:
    """Run `step` a few times and return the most bytes that tensors held at one time.

    Args:
        step: one training step on the CPU.
        steps: how many steps the window spans.
        warmup: steps before it, so that optimizer state exists and libraries have set themselves up.
        roots: as for `Ledger`.
    """
    for _ in range(warmup):
        step()
    ledger = Ledger("cpu", roots)
    ledger.start()
    try:
        for _ in range(steps):
            step()
    finally:
        peak = ledger.stop().peak_bytes
    assert peak is not None
    return peak
