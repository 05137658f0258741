"""What the objectives need to know of the pixels: read from the logits once, with one logits-sized result.

Written out in plain operations, the softmax, its logarithm, their masked products and all of their gradients
are six or more tensors of the size of the logits. Cross-entropy, focal and the region losses ask for less:
the log-probability of the true class at each pixel, and sums over pixels for each class. `read_pixels` gives
these, and its backward pass forms the gradient in two tensors of that size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Pixels:
    """The pixels of a batch, or of a strip of it, as the objectives see them. K is the number of classes.

    Attributes:
        target: (B, h, w) int64, the true class, 0 where ignored.
        valid: (B, h, w) bool, False where ignored.
        log_probability: (B, h, w), log-probability of the true class, 0 where ignored.
        class_probability: (K,), the sum over valid pixels of each class's probability; None if not asked for.
        class_log_probability: (K,), likewise of its logarithm.
    """

    target: Tensor
    valid: Tensor
    log_probability: Tensor
    class_probability: Tensor | None
    class_log_probability: Tensor | None

    def sums_by_class(self, values: Tensor, classes: int) -> Tensor:
        """Sum `values` (B, h, w) over the valid pixels of each true class: (K,), integers in int64.

        Row by row first: adding millions of pixels one after another would lose digits in fp32, and on a
        GPU every pixel would wait for the same few addresses.
        """
        rows = values.new_zeros(*values.shape[:2], classes)
        rows = rows.scatter_add(2, self.target, torch.where(self.valid, values, torch.zeros_like(values)))
        return rows.sum((0, 1))

    def counts(self, classes: int) -> Tensor:
        """Number of valid pixels of each class: (K,) int64."""
        return self.sums_by_class(torch.ones_like(self.target, dtype=torch.int32), classes)


def split_target(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Split labels (B, h, w) into (classes as int64 with 0 where ignored, the mask of valid pixels)."""
    valid = target != ignore_index
    return torch.where(valid, target, torch.zeros_like(target)).long(), valid


def read_pixels(
    logits: Tensor, target: Tensor, ignore_index: int, *, probabilities: bool, log_probabilities: bool
) -> Pixels:
    """Read logits (B, C, h, w) against target (B, h, w).

    One channel is a binary task: labels 0 and 1, the probability of 1 is the logit's sigmoid, K is 2.
    Otherwise the probabilities are the softmax over the channels and K is C.

    Args:
        logits: in fp32 or fp64.
        target: labels, any integer type.
        ignore_index: label of the pixels to leave out.
        probabilities: whether `class_probability` is wanted.
        log_probabilities: whether `class_log_probability` is wanted.
    """
    target, valid = split_target(target, ignore_index)
    if logits.shape[1] == 1:
        return _read_binary(logits[:, 0], target, valid)
    read: Any = _ReadSoftmax.apply
    own, class_probability, class_log_probability = read(
        logits, target, valid, probabilities, log_probabilities
    )
    return Pixels(target, valid, own, class_probability, class_log_probability)


def _read_binary(logit: Tensor, target: Tensor, valid: Tensor) -> Pixels:
    nothing = torch.zeros_like(logit)
    own = torch.where(valid, F.logsigmoid(torch.where(target == 1, logit, -logit)), nothing)

    def both(negative: Tensor, positive: Tensor) -> Tensor:
        return torch.stack([torch.where(valid, values, nothing).sum() for values in (negative, positive)])

    return Pixels(
        target,
        valid,
        own,
        both((-logit).sigmoid(), logit.sigmoid()),
        both(F.logsigmoid(-logit), F.logsigmoid(logit)),
    )


class _ReadSoftmax(torch.autograd.Function):
    """Log-probability of the true class (B, h, w); sums over valid pixels of p and of log p, (C,) each."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives it no public type
        logits: Tensor,
        target: Tensor,
        valid: Tensor,
        probabilities: bool,
        log_probabilities: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        highest = logits.amax(1, keepdim=True)
        work = torch.sub(logits, highest).exp_()
        total = work.sum(1, keepdim=True)
        log_total = total.log().add_(highest)
        mask = valid.unsqueeze(1)
        target = target.unsqueeze(1)
        own = torch.where(mask, logits.gather(1, target) - log_total, torch.zeros_like(log_total)).squeeze(1)
        p = log_p = None
        if probabilities:
            p = work.mul_(mask / total).sum((0, 2, 3))
        if log_probabilities:
            log_p = torch.sub(logits, log_total, out=work).mul_(mask).sum((0, 2, 3))
        ctx.save_for_backward(logits, target, mask, log_total)
        ctx.set_materialize_grads(False)
        return own, p, log_p

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_own: Tensor | None,
        grad_p: Tensor | None,
        grad_log_p: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None]:
        logits, target, mask, log_total = ctx.saved_tensors
        # An infinite log-sum makes the probabilities of ignored pixels 0, and with them all that follows.
        p = torch.sub(logits, torch.where(mask, log_total, torch.inf)).exp_()
        share = torch.zeros_like(log_total)
        if grad_own is not None:
            grad_own = torch.where(mask, grad_own.unsqueeze(1), share)
            share = share + grad_own
        if grad_log_p is not None:
            share = share + grad_log_p.sum()
        # d p_c / d z_k = p_k (delta_ck - p_c);  d log p_c / d z_k = delta_ck - p_k
        if grad_p is None:
            grad = p.mul_(-share)
        else:
            grad = p * grad_p.view(1, -1, 1, 1)
            share = share + grad.sum(1, keepdim=True)
            grad.addcmul_(p, share, value=-1)
        if grad_log_p is not None:
            grad.add_(grad_log_p.view(1, -1, 1, 1) * mask)
        if grad_own is not None:
            grad.scatter_add_(1, target, grad_own)
        return grad, None, None, None, None
