"""Finding tensors and counting the storages under them, each once."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def tensors_in(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - any nesting of containers
    """Yield every tensor reachable from `value`: modules, optimizers, and containers of them.

    A tensor's own gradient is yielded after it. Modules give parameters and buffers, optimizers their state
    (not their parameters).
    """
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from tensors_in(tensor)
    elif isinstance(value, torch.optim.Optimizer):
        for state in value.state.values():
            yield from tensors_in(state)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            yield from tensors_in(item)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the memory: of one sharded over processes (a DTensor), this process's shard."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def held_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the memory of one that wraps others: shards, quantised values and scales."""
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for part in inner:
            if isinstance(part, torch.Tensor):  # a sharded tensor has its mesh among its parts
                yield from held_parts(part)
    else:
        yield tensor


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages under `tensors`, views and shared storages counted once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        for part in held_parts(tensor):
            storage = part.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def static_bytes(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> int:
    """Bytes that stay from step to step: parameters, their gradients, buffers and optimizer state.

    A gradient that is not there yet (before the first backward, or after `zero_grad`) is counted at its
    parameter's size.
    """
    modules, optimizers = list(modules), list(optimizers)
    missing = {
        parameter: own_part(parameter).numel() * parameter.element_size()
        for module in modules
        for parameter in module.parameters()
        if parameter.requires_grad and parameter.grad is None
    }
    return storage_bytes(tensors_in([modules, optimizers])) + sum(missing.values())
