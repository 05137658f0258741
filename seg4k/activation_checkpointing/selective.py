"""Selective recomputation: all of a segment but the results of attention.

At high resolution almost all the work of a transformer block is attention, and almost all its memory is
not. The mechanism is torch's selective checkpointing (`create_selective_checkpoint_contexts`); here it is
told which operations are attention, whatever backend `F.scaled_dot_product_attention` chose.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

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
"""The `context_fn` for torch.compile, which takes a partial of torch's own function only."""


class AttentionKeeper(TorchFunctionMode):
    """The policy of one call of one segment: which results to keep, and how many were.

    As a context it marks the inside of an attention function: there, the math backend's product that follows
    the softmax is the result. It is entered anew in recomputation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0
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

    def policy(self, context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        """What torch asks for each operator."""
        if operator in FUSED:
            self.kept += 1
            return CheckpointPolicy.MUST_SAVE
        if self._inside:
            if operator in _SOFTMAX:
                self._after_softmax = True
            elif operator in _PRODUCT and self._after_softmax:
                self._after_softmax = False
                self.kept += 1
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(self) -> Any:  # noqa: ANN401 - torch's pair of context managers
        """The `context_fn` of `torch.utils.checkpoint.checkpoint`."""
        return create_selective_checkpoint_contexts(self.policy)  # type: ignore[no-untyped-call]


def no_attention(segment: str) -> UserError:
    """The error for a selective segment in which nothing was kept."""
    return UserError(
        f"activation_checkpointing: segment {segment} is selective, and no attention ran in it: nothing "
        "calls F.scaled_dot_product_attention. If it holds a timm transformer, set TIMM_FUSED_ATTN=1 before "
        "timm is imported; else give it the policy recompute."
    )
