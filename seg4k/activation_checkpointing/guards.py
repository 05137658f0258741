"""The guard of every step: a segment's boundary is what it was when backward comes to it.

`torch.utils.checkpoint` keeps a segment's positional inputs as saved tensors, and `saved_tensors_hooks` around
the call see exactly those (with selective recomputation, the kept results of attention too). The guard notes
each one's version counter, which every in-place change raises, and compares it before recomputation. It passes
on to hooks that are already in force, such as those of an outer segment or of `save_on_cpu`.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from seg4k.activation_checkpointing.errors import ActivationCheckpointingError, inexact

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_NESTED_VERSION = "_seg4k_version"


def version(tensor: Tensor) -> int:
    """The version counter of a tensor; inference tensors have none and give -1."""
    return -1 if tensor.is_inference() else tensor._version


def hooks_in_force() -> Hooks | None:
    """The saved-tensor hooks that a tensor saved right now would pass through."""
    return cast(Hooks | None, torch._C._autograd._top_saved_tensors_default_hooks(False))


class Saved:
    """A tensor held for a segment, or what outer hooks made of it, and its version when it was saved."""

    __slots__ = ("index", "payload", "version")

    def __init__(self, payload: Any, version: int, index: int) -> None:  # noqa: ANN401
        self.payload = payload
        self.version = version
        self.index = index


class BoundaryGuard(torch.autograd.graph.saved_tensors_hooks):
    """Hooks around one call of `torch.utils.checkpoint.checkpoint` for one segment.

    Args:
        segment: the name that errors give.
        inputs: how many tensors the segment takes; what is saved beyond them is a kept result.
    """

    def __init__(self, segment: str, inputs: int) -> None:
        # Locals, not self: the graph holds the hooks, and must not hold this object's owner through them.
        outer = hooks_in_force()
        count = 0

        def pack(tensor: Tensor) -> Saved:
            nonlocal count
            count += 1
            alias = tensor.detach()  # shares the version counter; holds no graph, so makes no cycle
            if outer is None:
                return Saved(alias, version(alias), count)
            # In an outer segment's recomputation its hook holds this very alias until backward needs it. The
            # note of its version travels with it; the number itself differs from that of the first forward.
            setattr(alias, _NESTED_VERSION, version(alias))
            return Saved(outer[0](alias), version(alias), count)

        def unpack(saved: Saved) -> Tensor:
            if outer is None:
                tensor, expected = saved.payload, saved.version
            else:
                tensor = outer[1](saved.payload)
                expected = getattr(tensor, _NESTED_VERSION, version(tensor))
            if version(tensor) != expected:
                raise changed_after(segment, saved.index, inputs)
            return cast(Tensor, tensor)

        super().__init__(pack, unpack)


def changed_after(segment: str, index: int, inputs: int) -> ActivationCheckpointingError:
    """The error for a saved tensor that was changed between the segment and its backward."""
    what = f"its input {index} of {inputs}" if index <= inputs else "a result of attention that it keeps"
    return inexact(
        segment,
        f"{what} was changed in place after the segment took it and before backward recomputed from it",
        "Write the change out of place (x = x + y for x += y, F.relu(x) for F.relu_(x)), or change a clone",
    )


def check_unchanged(segment: str, tensors: list[Tensor], before: list[int]) -> None:
    """Raise if a segment changed one of its own inputs.

    Raises:
        ActivationCheckpointingError: a version counter moved.
    """
    for index, (tensor, then) in enumerate(zip(tensors, before, strict=True), start=1):
        if version(tensor) != then:
            raise inexact(
                segment,
                f"it changes its own input {index} of {len(tensors)} in place, so that recomputing would start "
                "from another value",
                "Write the change out of place inside the segment (x = x + y for x += y, F.relu(x) for "
                "F.relu_(x)), or keep the segment: activation_checkpointing=plan",
            )
