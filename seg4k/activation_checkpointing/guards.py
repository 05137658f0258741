"""The guard of every step: a segment's inputs are what they were when backward comes to it.

`torch.utils.checkpoint` keeps a segment's positional inputs as saved tensors, and `saved_tensors_hooks`
around the call see exactly those (in selective recomputation, the kept results of attention too). The guard
notes the version counter of each, which every in-place change raises, and compares it before recomputation.
It passes tensors on to hooks that are in force already, such as those of an outer segment or `save_on_cpu`.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from seg4k.activation_checkpointing.errors import ActivationCheckpointingError, inexact

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_NESTED_VERSION = "_seg4k_version"
_FIX = "Write the change out of place (x = x + y for x += y, F.relu(x) for F.relu_(x)), or change a clone"


def version(tensor: Tensor) -> int:
    """The version counter of a tensor; inference tensors have none and give -1."""
    return -1 if tensor.is_inference() else tensor._version


def alias_of(tensor: Tensor) -> Tensor:
    """The same memory under the same version counter, without the graph (holding that could make a cycle)."""
    # Below autograd, where selective checkpointing packs, a plain detach would start a counter of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def hooks_in_force() -> Hooks | None:
    """The saved-tensor hooks that a tensor saved right now would pass through."""
    return cast(Hooks | None, torch._C._autograd._top_saved_tensors_default_hooks(False))


class Saved:
    """A tensor held for a segment, or what other hooks made of it, and its version when it was saved."""

    __slots__ = ("payload", "position", "version")

    def __init__(self, payload: Any, version: int, position: int) -> None:  # noqa: ANN401
        self.payload = payload
        self.version = version
        self.position = position


class BoundaryGuard(torch.autograd.graph.saved_tensors_hooks):
    """Hooks around one call of `torch.utils.checkpoint.checkpoint` for one segment.

    Args:
        segment: the name that errors give.
        inputs: how many tensors the segment takes; what is saved beyond them is a kept result.
    """

    def __init__(self, segment: str, inputs: int) -> None:
        outer = hooks_in_force()
        position = 0

        def pack(tensor: Tensor) -> Saved:
            nonlocal position
            position += 1
            alias = alias_of(tensor)
            if outer is None:
                return Saved(alias, version(alias), position)
            # While an outer segment is recomputed, its hooks hold this very alias until backward takes it.
            # The version travels with it, as the number differs from that of the first forward pass.
            setattr(alias, _NESTED_VERSION, version(alias))
            return Saved(outer[0](alias), version(alias), position)

        def unpack(saved: Saved) -> Tensor:
            if outer is None:
                tensor, expected = cast(Tensor, saved.payload), saved.version
            else:
                tensor = outer[1](saved.payload)
                expected = getattr(tensor, _NESTED_VERSION, version(tensor))
            if version(tensor) != expected:
                raise changed_after(segment, saved.position, inputs)
            return tensor

        super().__init__(pack, unpack)


def changed_after(segment: str, position: int, inputs: int) -> ActivationCheckpointingError:
    """The error for a saved tensor that was changed between the segment and its backward."""
    is_input = position <= inputs
    what = f"its input {position} of {inputs}" if is_input else "a result of attention that it keeps"
    return inexact(
        segment,
        f"{what} was changed in place after the segment took it and before backward recomputed from it",
        _FIX,
    )


def check_unchanged(segment: str, tensors: Sequence[Tensor], before: Sequence[int]) -> None:
    """Raise if a segment changed one of its own inputs.

    Raises:
        ActivationCheckpointingError: a version counter moved.
    """
    for position, (tensor, then) in enumerate(zip(tensors, before, strict=True), start=1):
        if version(tensor) != then:
            raise inexact(
                segment,
                f"it changes its own input {position} of {len(tensors)} in place, so that recomputing would "
                "start from another value",
                f"{_FIX}; or keep the segment, by activation_checkpointing=plan",
            )
