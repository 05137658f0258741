"""Selective recomputation: all of a segment but the results of attention.

At high resolution almost all the work of a transformer block is attention, and almost all its memory is not.
So attention's results are kept, whatever backend `F.scaled_dot_product_attention` chose, and in recomputation
they are given in its place. torch's own selective checkpointing does the same for any operator. In eager mode
it is not used: it holds results past the hooks of an outer segment, which would free them, and it counts all
operators, so that a guard which computes beside the segment would put it out.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from seg4k.activation_checkpointing.errors import inexact
from seg4k.activation_checkpointing.guards import Saved, alias_of
from seg4k.activation_checkpointing.watching import unwatched
from seg4k.errors import UserError

_FUSED_NAMES = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)
FUSED = tuple(getattr(torch.ops.aten, name).default for name in _FUSED_NAMES if hasattr(torch.ops.aten, name))
"""The attention operators of all backends but `math`, which is made of simpler operators."""

_SOFTMAX = {torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default}
_PRODUCT = {torch.ops.aten.bmm.default, torch.ops.aten.mm.default, torch.ops.aten.baddbmm.default}
# Taken now: a memory trace may replace the public name, by an operator of `FUSED`.
_ATTENTION_FUNCTIONS = {
    torch._C._nn.scaled_dot_product_attention,
    nn.functional.multi_head_attention_forward,
}

compiled_contexts = partial(create_selective_checkpoint_contexts, list(FUSED))
"""The `context_fn` for torch.compile, which understands a partial of torch's own function only."""


class AttentionMarker(TorchFunctionMode):
    """Tells which operators give the result of attention.

    As a context it marks the inside of attention functions: there, the math backend's product that follows
    the softmax is the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inside = False
        self._after_softmax = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Mark the inside of attention functions."""
        if func not in _ATTENTION_FUNCTIONS:
            return func(*args, **(kwargs or {}))
        self._inside, self._after_softmax = True, False
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._inside = False

    def gives_result(self, operator: object) -> bool:
        """Whether the operator, which is about to run, gives a result of attention. Ask once for each."""
        if operator in FUSED:
            return True
        if self._inside and operator in _SOFTMAX:
            self._after_softmax = True
        elif self._inside and self._after_softmax and operator in _PRODUCT:
            self._after_softmax = False
            return True
        return False


class RandomState:
    """The state of the global generator of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.state = self._now()

    def _now(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def has_changed(self) -> bool:
        """Whether random numbers were drawn since."""
        return not torch.equal(self.state, self._now())

    def put_back(self) -> None:
        """Draw on from here."""
        with unwatched():
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(self.state, self.device)
            else:
                torch.set_rng_state(self.state)


class AttentionKeeper(AttentionMarker):
    """Keeps the results of attention of one call of one segment, for its recomputation.

    Args:
        segment: the name that errors give.
        hooks: the guard around the call, through which results are held as all that backward needs.
    """

    def __init__(self, segment: str, hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
        super().__init__()
        self.segment = segment
        self.hooks = hooks
        self.kept = 0
        self.results: deque[Any] = deque()

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The `context_fn` of `torch.utils.checkpoint.checkpoint`."""
        return _Keep(self), _Give(self)

    def keep(self, result: Any, random_state: RandomState | None) -> None:  # noqa: ANN401
        """Hold a result (without its graph, which holds us) and the random state that follows it."""
        pack = self.hooks.pack_hook
        held = tree_map(lambda x: pack(alias_of(x)) if isinstance(x, Tensor) else x, result)
        self.results.append((held, random_state))
        self.kept += 1

    def give(self) -> Any:  # noqa: ANN401
        """The next result, in the order in which they were kept; it is let go of here."""
        if not self.results:
            raise inexact(
                self.segment,
                "recomputation runs attention of which no result is held: either the segment does not run "
                "the same operations again, or backward passes through it a second time",
                "Give the segment the policy recompute",
            )
        held, random_state = self.results.popleft()
        if random_state is not None:
            random_state.put_back()
        unpack = self.hooks.unpack_hook
        return tree_map(lambda x: unpack(x) if isinstance(x, Saved) else x, held)


class _Keep(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, keeper: AttentionKeeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeper = keeper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if not self.keeper.gives_result(func):
            return func(*args, **(kwargs or {}))
        # Fused attention draws its dropout itself. Recomputation, which skips it, has to draw on after it.
        device = args[0].device
        with unwatched():
            before = RandomState(device)
        result = func(*args, **(kwargs or {}))
        with unwatched():
            after = RandomState(device) if before.has_changed() else None
        self.keeper.keep(result, after)
        return result


class _Give(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, keeper: AttentionKeeper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeper = keeper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if self.keeper.gives_result(func):
            return self.keeper.give()
        return func(*args, **(kwargs or {}))


def no_attention(segment: str) -> UserError:
    """The error for a selective segment in which nothing was kept."""
    return UserError(
        f"activation_checkpointing: segment {segment} is selective, and no attention ran in it: nothing "
        "calls F.scaled_dot_product_attention. If it holds a timm transformer, set TIMM_FUSED_ATTN=1 before "
        "timm is imported; else give it the policy recompute."
    )
