"""One of several processes that train together, while the others are not there.

The step runs as it would on the first of them: FSDP2 itself gathers and lets go of parameters, on a process
group that exchanges nothing. DDP's buckets are made by hand, since its reducer knows no fake tensors.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from seg4k.memory.recorder import Recorder

__all__ = ["Buckets", "coming_and_going", "one_of"]


@contextmanager
def one_of(processes: int) -> Iterator[DeviceMesh]:
    """A one-dimensional mesh of `processes`, of which this is the first and the others are missing.

    It takes the default process group of this process meanwhile.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # also registers the backend

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield init_device_mesh("cpu", (processes,))
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def coming_and_going(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder where a storage changes its size, as those of gathered parameters do."""
    plain: Callable[..., object] = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> object:  # noqa: ANN401
        result = plain(storage, size)
        recorder.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


class Buckets:
    """DDP's buckets: as large as all gradients, there from the start, with gradients that are views of them.

    Gradients that are accumulated without an exchange lie beside them, since DDP does not look at them before
    the last batch of a step.

    Args:
        module: whose trainable parameters are exchanged.
    """

    def __init__(self, module: nn.Module) -> None:
        self._views: Mapping[nn.Parameter, torch.Tensor] = {
            parameter: torch.zeros_like(parameter)
            for parameter in module.parameters()
            if parameter.requires_grad
        }

    def tensors(self) -> Iterator[torch.Tensor]:
        """What they hold."""
        yield from self._views.values()

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """Move a gradient that is complete, if there is one, into its bucket, and return it."""
        view = self._views[parameter]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view
        return view
