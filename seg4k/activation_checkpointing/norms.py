"""Running statistics of normalisation layers, which recomputation must not update again."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from seg4k.activation_checkpointing.watching import unwatched


def running_statistics(module: nn.Module) -> list[Tensor]:
    """The running mean, variance and batch counter of every layer inside a module that keeps them."""
    return [
        statistic
        for layer in module.modules()
        if isinstance(layer, _NormBase)
        for statistic in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        if statistic is not None
    ]


@contextmanager
def frozen_statistics(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put running statistics back, bit for bit, when the block ends, however it ends.

    The layers update them as ever: turning that off would make recomputation save other tensors than the
    forward pass did, and a momentum of 0 is not exact once a statistic is infinite. `.data` keeps the version
    counters as they are, since autograd may hold the same buffers.
    """
    statistics = [statistic for module in modules for statistic in running_statistics(module)]
    with unwatched():
        before = [statistic.clone() for statistic in statistics]
    try:
        yield
    finally:
        with unwatched():
            for statistic, value in zip(statistics, before, strict=True):
                statistic.data.copy_(value)
