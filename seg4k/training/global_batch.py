"""One optimizer step as one batch, however it is split over accumulation and processes.

The loss of a step is a mean over the valid pixels of its *global* batch. How many those are is known when its
last micro-batch is in. So each micro-batch's loss is divided by all of its pixels, valid or not, which are
equally many in each; the means over accumulation and processes that Lightning, DDP and FSDP take then make
(sum over pixels) / (all pixels); and before the optimizer steps, gradients are multiplied by
(all pixels) / (valid pixels). That is the gradient of the big batch up to rounding, and where no pixel is
ignored the factor is exactly 1.

Cross-entropy and focal are sums over pixels and so are exact. Region losses (Dice and its kin) are not linear
in the pixels: theirs is the mean of the losses of the micro-batches, weighted by their valid pixels.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class StepTotals:
    """What the processes know of one optimizer step once they have added up.

    Attributes:
        loss: the loss of the global batch; 0 where no pixel was valid.
        factor: what the averaged gradients are to be multiplied by.
        stop: whether any process asks to stop after this step.
    """

    loss: float
    factor: float
    stop: bool


class GlobalBatch:
    """Adds up the micro-batches of an optimizer step on this process, then over all processes."""

    def __init__(self) -> None:
        self.parts = 0
        self._pixels = 0
        self._sums: Tensor | None = None

    def add(self, loss: Tensor, count: Tensor, class_weights: Tensor, pixels: int) -> None:
        """Count one micro-batch.

        Args:
            loss: its loss, a scalar, with `pixels` as the normalizer.
            count: its valid pixels of each label, (labels,).
            class_weights: one weight per label, (labels,).
            pixels: all of its pixels; the same number in each micro-batch.
        """
        assert self.parts == 0 or pixels == self._pixels
        valid = (count.double() * class_weights.double()).sum()
        sums = torch.stack([loss.detach().double() * pixels, valid])
        self._sums = sums if self._sums is None else self._sums + sums
        self._pixels = pixels
        self.parts += 1

    def close(self, stop: bool = False) -> StepTotals:
        """Add up over the processes, and begin the next step.

        Args:
            stop: whether this process asks to stop; all get the same answer in the same step.
        """
        assert self._sums is not None
        sums = torch.cat([self._sums, self._sums.new_tensor([float(stop)])])
        world = 1
        if _distributed():
            torch.distributed.all_reduce(sums)
            world = torch.distributed.get_world_size()
        total, valid, stops = sums.tolist()
        pixels = self._pixels * self.parts * world
        self.parts, self._sums = 0, None
        return StepTotals(total / valid if valid else total, pixels / valid if valid else 1.0, stops > 0)


def finish_gradients(parameters: Iterable[nn.Parameter], factor: float, largest_norm: float) -> float:
    """Multiply gradients by `factor`, then clip them to `largest_norm` (0: do not), in place.

    Returns:
        The norm of all gradients after `factor`, before clipping; over all shards where they are sharded.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    meshes = [gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    if not local:
        return 0.0
    square = torch.stack(torch._foreach_norm(local)).double().square().sum()
    if meshes:  # of fsdp, which shards every parameter over all processes
        square = square.to(
            meshes[0].device_type
        )  # offloaded gradients lie on the CPU, which is not connected
        torch.distributed.all_reduce(square)
    norm = float(square.sqrt()) * factor
    if largest_norm > 0:
        # As torch.nn.utils.clip_grad_norm_ has it.
        factor *= min(1.0, largest_norm / (norm + 1e-6))
    if factor != 1:
        torch._foreach_mul_(local, factor)
    return norm


def running_statistics(model: nn.Module, *, synchronised: bool = True) -> list[Tensor]:
    """Running means and variances of the batch norms; `synchronised` those of SyncBatchNorm too."""
    return [
        statistic
        for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and (synchronised or not isinstance(layer, nn.SyncBatchNorm))
        for statistic in (layer.running_mean, layer.running_var)
        if statistic is not None
    ]


@torch.no_grad()
def average_running_statistics(model: nn.Module) -> None:
    """Set the running statistics of batch norms to their mean over the processes.

    They are linear in the statistics of the batches, so it does not matter how often this is done; done at
    each step, any process holds those of the run.
    """
    statistics = running_statistics(model, synchronised=False)  # those are alike already
    if not statistics or not _distributed():
        return
    flat = torch.cat([statistic.flatten() for statistic in statistics])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    for statistic, mean in zip(
        statistics, torch.split(flat, [one.numel() for one in statistics]), strict=True
    ):
        statistic.copy_(mean.view_as(statistic))


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
