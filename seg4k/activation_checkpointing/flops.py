"""Counting floating-point operations, by torch's own formulas."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from seg4k.activation_checkpointing.selective import AttentionMarker

Formula = Callable[..., int]


def _attention_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_on_cpu_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:  # noqa: ANN401
    shapes = (grad.shape, query.shape, key.shape, value.shape)
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def formulas() -> Mapping[Any, Formula]:
    """Operator to formula: torch's table, of `FlopCounterMode`, and the CPU's attention, which it lacks."""
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_on_cpu_backward,
        **flop_registry,
    }


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operations that run in its context, backward included.

    Attributes:
        total: floating-point operations so far.
        attention: those of them that selective recomputation would not repeat.
    """

    def __init__(self, marker: AttentionMarker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marker = marker
        self.formulas = formulas()
        self.total = 0
        self.attention = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and count it."""
        kept = self.marker.gives_result(func)
        result = func(*args, **(kwargs or {}))
        formula = self.formulas.get(getattr(func, "_overloadpacket", None))
        if formula is not None:
            flops = int(formula(*args, **(kwargs or {}), out_val=result))
            self.total += flops
            if kept:
                self.attention += flops
        if kept:
            self.attention_ran()
        return result

    def attention_ran(self) -> None:
        """After an operation whose result selective recomputation keeps."""
