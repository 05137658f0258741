"""Watching a segment's operations, and keeping one's own out of sight."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from seg4k.activation_checkpointing.fingerprint import Fingerprint, fingerprint, storage_key

_UNDEFINED = ("aten::empty", "aten::new_empty", "aten::resize")
"""Operators whose result has no defined content."""
_CASTS = {torch.ops.aten._to_copy.default}
_BIRTHS = {torch.ops.aten.lift_fresh.default}
"""Operators whose result was just made from Python values, though its memory is that of their argument."""
_SEGMENT_CALL = str(Path(__file__).with_name("segment_call.py"))
_FSDP = str(Path(torch.__file__).parent / "distributed" / "fsdp")


@contextmanager
def unwatched() -> Iterator[None]:
    """Run the operations of the block past every mode in force, without gradients.

    FLOP counters and tracers add up what they see: what the guards do beside the model must not show.
    """
    with _disable_current_modes(), torch.no_grad():
        yield


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells memory born inside its context from memory born outside, and looks at each result.

    Args:
        exempt: memory (by `storage_key`) that may be read and written as the model likes.
        sharded: FSDP runs operations of its own inside, from hooks, which are not looked at.
    """

    def __init__(self, exempt: set[Any], sharded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exempt = exempt
        self._sharded = sharded
        self._inside: set[Any] = set()

    def before(self, func: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:  # noqa: ANN401
        """Before an operation: the tensors born outside that it takes, and those of them that it changes."""

    def after(self, func: Any, contents: list[Fingerprint | None]) -> None:  # noqa: ANN401
        """After an operation that has something to tell: its result, or what it changed."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Look at an operation before and after it runs."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or (self._sharded and _called_by_fsdp()):
            return func(*args, **kwargs)
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func in _BIRTHS:
            self._inside |= {storage_key(tensor) for tensor in taken}
        written = _written_by(func, args, kwargs)
        read = [tensor for tensor in taken if self._is_outside(tensor)]
        with unwatched():
            self.before(func, read, [tensor for tensor in written if self._is_outside(tensor)])
        result = func(*args, **kwargs)
        self._look_at(func, taken, read, written, result)
        return result

    def _is_outside(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key is not None and key not in self._inside and key not in self._exempt

    def _look_at(
        self,
        func: Any,  # noqa: ANN401
        taken: Sequence[Tensor],
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        result: Any,  # noqa: ANN401
    ) -> None:
        known = {storage_key(tensor) for tensor in taken}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._inside |= {storage_key(tensor) for tensor in made} - known
        if func._schema.name.startswith(_UNDEFINED):
            return
        if func in _CASTS and read:
            return  # autocast casts a weight once, and may have done so before the segment
        if isinstance(result, tuple):
            made = made[:1]  # what comes beside is padded, or scratch that cuDNN leaves undefined
        fresh = [tensor for tensor in made if storage_key(tensor) not in known or func in _BIRTHS]
        changed = [tensor for tensor in written if storage_key(tensor) not in self._exempt]
        if fresh or changed:
            with unwatched():
                self.after(func, [fingerprint(tensor) for tensor in (*fresh, *changed)])


def _written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:  # noqa: ANN401
    """The tensors that an operator changes in place, by its schema."""
    written: list[Tensor] = []
    if func._schema.is_mutable:
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 holds the parameters of a module."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _called_by_fsdp() -> bool:
    """Whether FSDP runs the current operation: it gathers parameters in forward, but before recomputation.

    Only what lies inside the segment's call counts: FSDP may also have called the model as a whole.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _SEGMENT_CALL:
        if frame.f_code.co_filename.startswith(_FSDP):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
