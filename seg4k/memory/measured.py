"""How long the segments of a model take on the machine at hand, each run alone on tensors of its shapes."""

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from seg4k.memory.step import Step, autocast
from seg4k.memory.traced import Argument

__all__ = ["measure_segments"]

_REPEATS = 3
_ENOUGH = 2.0  # seconds: a forward that takes longer is not repeated


def measure_segments(
    step: Step, arguments: Mapping[str, tuple[object, ...]], device: torch.device
) -> dict[str, float]:
    """Seconds of the forward of each innermost segment, recording for backward, as recomputation runs it.

    Segments that are alike, as the blocks of a ViT are, are measured once. One that the machine has no memory
    for is left out.

    Args:
        step: whose model and precision; the model may lie on "meta".
        arguments: per segment what it takes, see `Held.arguments`.
        device: where to measure.
    """
    found: dict[str, float] = {}
    known: dict[object, float | None] = {}
    for name, module in _innermost(step.model.segments(), arguments):  # type: ignore[operator]
        alike = _looks(module, arguments[name])
        if alike not in known:
            known[alike] = _forward_seconds(module, arguments[name], step.precision, device)
        seconds = known[alike]
        if seconds is not None:
            found[name] = seconds
    return found


def _innermost(segments: Mapping[str, nn.Module], names: Iterable[str]) -> list[tuple[str, nn.Module]]:
    return [
        (name, segments[name])
        for name in names
        if not any(other.startswith(f"{name}.") for other in segments)
    ]


def _looks(module: nn.Module, arguments: tuple[object, ...]) -> object:
    parts = tuple((name, type(part).__qualname__, part.extra_repr()) for name, part in module.named_modules())
    tensors = tuple((name, tuple(tensor.shape)) for name, tensor in module.state_dict().items())
    return parts, tensors, repr(arguments)


def _forward_seconds(
    module: nn.Module, arguments: tuple[object, ...], precision: str, device: torch.device
) -> float | None:
    try:
        own = copy.deepcopy(module).to_empty(device=device).train()
        with torch.no_grad():
            for tensor in (*own.parameters(), *own.buffers()):
                if tensor.is_floating_point():
                    tensor.fill_(0.01)
                else:
                    tensor.zero_()
        made = [_make(argument, device) for argument in arguments]

        def run() -> None:
            with autocast(precision, device.type):
                own(*made)

        return _best(run, device)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _make(argument: object, device: torch.device) -> Any:  # noqa: ANN401 - whatever a segment takes
    if not isinstance(argument, Argument):
        return argument
    if not argument.dtype.is_floating_point:
        return torch.zeros(argument.shape, dtype=argument.dtype, device=device)
    values = torch.rand(argument.shape, device=device).to(argument.dtype)
    return values.requires_grad_(argument.requires_grad)


def _best(run: Callable[[], None], device: torch.device) -> float:
    best = float("inf")
    for index in range(_REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        if index > 0 or seconds > _ENOUGH:  # the first sets libraries up
            best = min(best, seconds)
        if seconds > _ENOUGH:
            break
    return best
