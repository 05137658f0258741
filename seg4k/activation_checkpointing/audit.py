"""The audit: run a segment's forward and recomputation under watch, operation by operation.

What the guard of every step cannot see, because no version counter tells of it or because the tensor is no
input of the segment, the audit finds:

- an operation in the segment that writes to memory born outside it (an input, a closure, a buffer, `.data`);
- memory born outside, read in the segment, that holds something else when the segment is recomputed;
- an operation that gives another result in recomputation (Python's `random`, numpy, an explicit generator, a
  counter).

It keeps numbers, not tensors, and so costs time only.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from seg4k.activation_checkpointing.errors import ActivationCheckpointingError, inexact
from seg4k.activation_checkpointing.fingerprint import Fingerprint, can_be_read, fingerprint, storage_key
from seg4k.activation_checkpointing.norms import running_statistics
from seg4k.activation_checkpointing.watching import Watch, is_sharded, unwatched

_FIX_WRITE = (
    "Recomputing would do it twice, or start from what it left. Write it out of place inside the segment "
    "(x = x + y for x += y, F.relu(x) for F.relu_(x)), move it out of the segment, or keep the segment, by "
    "activation_checkpointing=plan"
)
_FIX_READ = (
    "Between a segment and its backward nothing that it reads may change: change a clone, or change it after "
    "backward"
)
_FIX_RESULT = (
    "Recomputing is exact only if the segment computes the same again. Draw random numbers from torch's "
    "global generator (which is put back) and not from Python, numpy or a generator of your own, and let "
    "nothing in the segment count its calls or depend on the time; or keep the segment, by "
    "activation_checkpointing=plan"
)


@dataclass
class Outside:
    """Memory born outside the segment, as it was when the segment first read it."""

    label: str
    where: str
    memory: StorageWeakRef
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    content: Fingerprint

    def now(self) -> Fingerprint | None:
        """The same memory's content now, or None once it is freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            return None
        extent = 1 + self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        if storage.nbytes() < extent * self.dtype.itemsize:
            return None  # sharded parameters give their memory back in between
        flat = torch.empty(0, dtype=self.dtype, device=storage.device)
        return fingerprint(flat.set_(storage, self.offset, self.size, self.stride))


@dataclass
class Step:
    """One operation of the forward pass and what it gave."""

    operator: str
    where: str
    contents: list[Fingerprint | None]

    def gave(self, operator: str, contents: Sequence[Fingerprint | None]) -> bool:
        """Whether it is this operator with these results."""
        return self.operator == operator and all(
            mine is None or other is None or mine.matches(other)
            for mine, other in zip(self.contents, contents, strict=True)
        )


class Audit:
    """What one call of a segment did, for comparison with its recomputation.

    Args:
        segment: the name that errors give.
        modules: the modules of the segment (one, or those of a run) by full name.
    """

    def __init__(self, segment: str, modules: Mapping[str, nn.Module]) -> None:
        self.segment = segment
        self.inputs: list[Fingerprint | None] = []
        self.outside: dict[Any, Outside] = {}
        self.steps: list[Step] = []
        self.exempt = {storage_key(statistic) for statistic in running_statistics(modules.values())}
        self.sharded = any(is_sharded(inner) for module in modules.values() for inner in module.modules())
        self._names: dict[nn.Module, str] = {}
        self._labels: dict[Any, str] = {}
        self._running: list[str] = []
        for prefix, module in modules.items():
            for name, inner in module.named_modules():
                self._names[inner] = f"{prefix}.{name}" if name else prefix
            for name, parameter in module.named_parameters():
                self._labels[storage_key(parameter)] = f"the parameter {prefix}.{name}"
            for name, buffer in module.named_buffers():
                self._labels[storage_key(buffer)] = f"the buffer {prefix}.{name}"

    @contextmanager
    def forward(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Record the operations of the block.

        Raises:
            ActivationCheckpointingError: where one writes to memory born outside the block.
        """
        with unwatched():
            self.inputs = [fingerprint(tensor) for tensor in tensors]
        for position, tensor in enumerate(tensors, start=1):
            self._labels.setdefault(storage_key(tensor), f"its input {position} of {len(tensors)}")
        with self._module_names(), _Forward(self):
            yield

    @contextmanager
    def recompute(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Compare the operations of the block with those recorded.

        Raises:
            ActivationCheckpointingError: at the first difference.
        """
        with unwatched():
            for position, (tensor, then) in enumerate(zip(tensors, self.inputs, strict=True), start=1):
                self._compare(then, fingerprint(tensor), f"its input {position} of {len(tensors)}")
            for read in self.outside.values():
                self._compare(read.content, read.now(), f"{read.label}, read in {read.where},")
        with self._module_names(), _Recompute(self):
            yield

    def _compare(self, then: Fingerprint | None, now: Fingerprint | None, what: str) -> None:
        if then is not None and now is not None and not now.matches(then):
            raise inexact(
                self.segment,
                f"{what} holds other values in backward than when the segment took it",
                _FIX_READ,
            )

    def label(self, tensor: Tensor) -> str:
        """What to call memory born outside."""
        return self._labels.get(storage_key(tensor), "a tensor born outside it")

    def where(self) -> str:
        """The module of the segment that is running."""
        return self._running[-1] if self._running else self.segment

    @contextmanager
    def _module_names(self) -> Iterator[None]:
        """Know in the block which module of the segment is running."""

        def enter(module: nn.Module, *_: object) -> None:
            if module in self._names:
                self._running.append(self._names[module])

        def leave(module: nn.Module, *_: object) -> None:
            if module in self._names and self._running:
                self._running.pop()

        with ExitStack() as stack:
            self._running.clear()
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield


class _Forward(Watch):  # type: ignore[no-untyped-call]
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit.exempt, audit.sharded)
        self.audit = audit

    def before(self, func: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:  # noqa: ANN401
        audit = self.audit
        for tensor in written:
            raise inexact(
                audit.segment,
                f"{func} in {audit.where()}{_line()} changes {audit.label(tensor)} in place",
                _FIX_WRITE,
            )
        for tensor in read:
            key = (storage_key(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
            content = fingerprint(tensor) if key not in audit.outside and can_be_read(tensor) else None
            if content is not None:
                audit.outside[key] = Outside(
                    audit.label(tensor),
                    audit.where(),
                    StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.stride(),
                    int(tensor.storage_offset()),
                    content,
                )

    def after(self, func: Any, contents: list[Fingerprint | None]) -> None:  # noqa: ANN401
        self.audit.steps.append(Step(str(func), self.audit.where(), contents))


class _Recompute(Watch):  # type: ignore[no-untyped-call]
    """Finds each operation again among those of the forward pass, in order.

    Some may be missing: a module that computed a table in its first call and kept it reads it now.
    """

    def __init__(self, audit: Audit) -> None:
        super().__init__(audit.exempt, audit.sharded)
        self.audit = audit
        self.position = 0

    def after(self, func: Any, contents: list[Fingerprint | None]) -> None:  # noqa: ANN401
        operator, steps = str(func), self.audit.steps
        for position in range(self.position, len(steps)):
            if steps[position].gave(operator, contents):
                self.position = position + 1
                return
        raise self._differs(operator)

    def _differs(self, operator: str) -> ActivationCheckpointingError:
        audit, rest = self.audit, self.audit.steps[self.position :]
        what = f"in recomputation {operator} in {audit.where()}{_line()}"
        if not rest or all(step.operator != operator for step in rest):
            then = f"{rest[0].operator} in {rest[0].where}" if rest else "nothing more"
            return inexact(audit.segment, f"{what} runs where the forward pass ran {then}", _FIX_RESULT)
        return inexact(audit.segment, f"{what} gives other values than in the forward pass", _FIX_RESULT)


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def _line() -> str:
    """The line of the user's code that is running, as ` (file:line)`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
