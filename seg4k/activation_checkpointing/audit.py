"""The audit: run a segment's forward and recomputation under watch, operation by operation.

What the guard of every step cannot see, because no version counter tells of it or because the tensor is no
input of the segment, the audit finds:

- an operation in the segment that writes to memory born outside it (an input, a closure, a buffer, `.data`);
- memory born outside, read in the segment, that holds something else when it is recomputed;
- an operation that gives another result in recomputation (Python's `random`, numpy, an explicit generator, a
  counter).

It keeps numbers, not tensors, and so costs time only.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seg4k.activation_checkpointing.errors import ActivationCheckpointingError, inexact
from seg4k.activation_checkpointing.fingerprint import Fingerprint, can_be_read, fingerprint, storage_key
from seg4k.activation_checkpointing.norms import running_statistics
from seg4k.activation_checkpointing.watching import unwatched

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

_CASTS = {torch.ops.aten._to_copy.default}
_UNDEFINED = ("aten::empty", "aten::new_empty", "aten::resize")
"""Operators whose result has no defined content."""
_BIRTHS = {torch.ops.aten.lift_fresh.default}
"""Operators whose result was just made from Python values, though its memory comes from their argument."""


@dataclass
class Outside:
    """Memory born outside the segment, as it was when the segment first read it."""

    label: str
    where: str
    storage: int
    weak_storage: Any
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    content: Fingerprint

    def now(self) -> Tensor | None:
        """The same memory now, or None once it is freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak_storage.cdata)
        if storage is None:
            return None
        extent = 1 + self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        if storage.nbytes() < extent * self.dtype.itemsize:
            return None  # sharded parameters give their memory back in between
        flat = torch.empty(0, dtype=self.dtype, device=storage.device)
        return flat.set_(storage, self.offset, self.size, self.stride)


@dataclass
class Step:
    """One operation of the forward pass and what it gave."""

    operator: str
    where: str
    contents: list[Fingerprint | None]


@dataclass
class Audit:
    """What one call of a segment did, for comparison with its recomputation.

    Args:
        segment: the name that errors give.
        modules: the modules of the segment (one, or those of a run) by full name.
    """

    segment: str
    modules: Mapping[str, nn.Module]
    inputs: list[Fingerprint | None] = field(default_factory=list)
    outside: dict[Any, Outside] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names: dict[int, str] = {}
        self.labels: dict[Any, str] = {}
        statistics = running_statistics(self.modules.values())
        self.exempt: set[Any] = {storage_key(statistic) for statistic in statistics}
        self.sharded = any(
            is_sharded(inner) for module in self.modules.values() for inner in module.modules()
        )
        for prefix, module in self.modules.items():
            for name, inner in module.named_modules():
                self.names[id(inner)] = f"{prefix}.{name}" if name else prefix
            for kind, tensors in (
                ("parameter", module.named_parameters()),
                ("buffer", module.named_buffers()),
            ):
                for name, tensor in tensors:
                    self.labels[storage_key(tensor)] = f"the {kind} {prefix}.{name}"

    @contextmanager
    def forward(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Record the operations of the block."""
        with unwatched():
            self.inputs = [fingerprint(tensor) for tensor in tensors]
        for index, tensor in enumerate(tensors, start=1):
            self.labels.setdefault(storage_key(tensor), f"its input {index} of {len(tensors)}")
        with _Forward(self):
            yield

    @contextmanager
    def recompute(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Compare the operations of the block with those recorded.

        Raises:
            ActivationCheckpointingError: at the first difference.
        """
        with unwatched():
            for index, (tensor, then) in enumerate(zip(tensors, self.inputs, strict=True), start=1):
                now = fingerprint(tensor)
                if then is not None and now is not None and not now.matches(then):
                    raise inexact(
                        self.segment,
                        f"its input {index} of {len(tensors)} holds other values in backward than when the "
                        "segment took it",
                        _FIX_READ,
                    )
            for read in self.outside.values():
                tensor_now = read.now()
                now = None if tensor_now is None else fingerprint(tensor_now)
                if now is not None and not now.matches(read.content):
                    raise inexact(
                        self.segment,
                        f"{read.label}, read in {read.where}, holds other values in backward than when the "
                        "segment read it",
                        _FIX_READ,
                    )
        with _Recompute(self):
            yield

    def where(self) -> str:
        """The innermost module of the segment that is running, and the line of code."""
        frame = sys._getframe(1)
        module = line = None
        while frame is not None and (module is None or line is None):
            file = frame.f_code.co_filename
            if line is None and not file.startswith(_OWN):
                line = f"{Path(file).name}:{frame.f_lineno}"
            if module is None:
                module = self.names.get(id(frame.f_locals.get("self")))
            frame = frame.f_back  # type: ignore[assignment]
        return f"{module or self.segment} ({line})" if line else module or self.segment


_FSDP = str(Path(torch.__file__).parent / "distributed" / "fsdp")
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What both passes have in common: telling memory born inside from memory born outside."""

    def __init__(self, audit: Audit) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.audit = audit
        self.inside: set[Any] = set()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Look at an operation before and after it runs."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or (self.audit.sharded and called_by_fsdp()):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in _BIRTHS:
            self.inside |= {storage_key(tensor) for tensor in tensors}
        from_outside = [tensor for tensor in tensors if self.is_outside(tensor)]
        written = written_by(func, args, kwargs)
        self.before(func, from_outside, written)
        result = func(*args, **kwargs)
        keys = {storage_key(tensor) for tensor in tensors}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.inside |= {storage_key(tensor) for tensor in made} - keys
        if is_telling(func, from_outside):
            fresh = [tensor for tensor in made if storage_key(tensor) not in keys or func in _BIRTHS]
            changed = [tensor for tensor in written if storage_key(tensor) not in self.audit.exempt]
            if fresh or changed:
                with unwatched():
                    self.after(func, [fingerprint(tensor) for tensor in (*fresh, *changed)])
        return result

    def is_outside(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key is not None and key not in self.inside and key not in self.audit.exempt

    def before(self, func: Any, from_outside: list[Tensor], written: list[Tensor]) -> None:  # noqa: ANN401
        pass

    def after(self, func: Any, contents: list[Fingerprint | None]) -> None:  # noqa: ANN401
        pass


class _Forward(_Watch):  # type: ignore[no-untyped-call]
    def before(self, func: Any, from_outside: list[Tensor], written: list[Tensor]) -> None:  # noqa: ANN401
        audit = self.audit
        for tensor in written:
            if self.is_outside(tensor):
                label = audit.labels.get(storage_key(tensor), "a tensor born outside it")
                raise inexact(
                    audit.segment,
                    f"{func} in {audit.where()} changes {label} in place",
                    _FIX_WRITE,
                )
        for tensor in from_outside:
            key = (storage_key(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
            if key in audit.outside or not can_be_read(tensor):
                continue
            with unwatched():
                content = fingerprint(tensor)
            if content is not None:
                audit.outside[key] = Outside(
                    audit.labels.get(key[0], "a tensor born outside it"),
                    audit.where(),
                    key[0],
                    StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.stride(),
                    int(tensor.storage_offset()),
                    content,
                )

    def after(self, func: Any, contents: list[Fingerprint | None]) -> None:  # noqa: ANN401
        self.audit.steps.append(Step(str(func), self.audit.where(), contents))


class _Recompute(_Watch):  # type: ignore[no-untyped-call]
    def __init__(self, audit: Audit) -> None:
        super().__init__(audit)
        self.position = 0

    def after(self, func: Any, contents: list[Fingerprint | None]) -> None:  # noqa: ANN401
        audit, position = self.audit, self.position
        self.position += 1
        if position >= len(audit.steps):
            raise self.differs(f"runs more operations in recomputation, the first {func} in {audit.where()}")
        then = audit.steps[position]
        if str(func) != then.operator:
            raise self.differs(
                f"runs {func} in {audit.where()} in recomputation where the forward pass ran {then.operator} "
                f"in {then.where}"
            )
        same = len(contents) == len(then.contents) and all(
            now is None or before is None or now.matches(before)
            for now, before in zip(contents, then.contents, strict=True)
        )
        if not same:
            raise self.differs(
                f"{func} in {audit.where()} gives other values in recomputation than in the forward pass"
            )

    def differs(self, what: str) -> ActivationCheckpointingError:
        return inexact(self.audit.segment, what, _FIX_RESULT)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 holds the parameters of a module."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def called_by_fsdp() -> bool:
    """Whether FSDP runs the current operation, from a hook of a module inside the segment.

    It gathers parameters in forward, and before recomputation rather than in it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_FSDP):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:  # noqa: ANN401
    """The tensors that an operator changes in place, by its schema."""
    written: list[Tensor] = []
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


def is_telling(func: Any, from_outside: list[Tensor]) -> bool:  # noqa: ANN401
    """Whether an operator runs in forward and recomputation alike, and with a result to compare.

    Not so are operators without defined content, and casts of what was born outside: autocast runs those of
    weights once, and may have done so before the segment.
    """
    name = func._schema.name
    if name.startswith(_UNDEFINED):
        return False
    return not (func in _CASTS and from_outside)
