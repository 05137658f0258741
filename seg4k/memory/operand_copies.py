"""Copies that PyTorch makes of a convolution's operands which are not contiguous, on every device.

Rows cut out of features (B, C, H, W) are such an operand. An operator's fake result tells nothing of the
copy: it is made and let go of inside (`input.contiguous(backend_memory_format)` in
aten/src/ATen/native/Convolution.cpp, and the gradient likewise in cuDNN's and oneDNN's own functions).
"""

from typing import Any

import torch

__all__ = ["copied_operand_bytes"]

aten = torch.ops.aten
_OPERANDS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}


def copied_operand_bytes(func: Any, args: tuple[Any, ...], out: Any = None) -> int:  # noqa: ANN401
    """Bytes of the copies that an operator makes of its operands, in (N, C, H, W) or channels last."""
    operands = args[: _OPERANDS.get(func, 0)]
    if not operands or operands[0].ndim != 4:
        return 0
    last = any(
        one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous() for one in operands
    )
    layout = torch.channels_last if last else torch.contiguous_format
    return sum(
        one.numel() * one.element_size() for one in operands if not one.is_contiguous(memory_format=layout)
    )
