"""Running statistics of normalisation layers, which recomputation must not update again."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from seg4k.activation_checkpointing.watching import unwatched


def running_statistics(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The running mean, variance and batch counter of every layer inside that keeps them."""
    return [
        statistic
        for module in modules
        for layer in module.modules()
        if isinstance(layer, _NormBase)
        for statistic in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        if statistic is not None
    ]


def values_of(statistics: Sequence[Tensor]) -> list[Tensor]:
    """Copies of statistics."""
    with unwatched():
        return [statistic.clone() for statistic in statistics]


def _set(statistics: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with unwatched():
        for statistic, value in zip(statistics, values, strict=True):
            statistic.data.copy_(value)  # past the version counter: autograd may hold the same buffer


@contextmanager
def statistics_as_before(statistics: Sequence[Tensor], before: Sequence[Tensor]) -> Iterator[None]:
    """Run the block with other values in the statistics; what they were is put back however it ends.

    Recomputation starts from the statistics that the forward pass started from, since some layers read them,
    and leaves those that the forward pass left. A momentum of 0 would not be exact once a statistic is
    infinite, and without tracking the layers would save other tensors than the forward pass did.
    """
    after = values_of(statistics)
    _set(statistics, before)
    try:
        yield
    finally:
        _set(statistics, after)
