"""Comparing and cutting maps so that a graph traced at one size holds at every size."""

import torch
from torch import Tensor


def has_size(x: Tensor, height: int, width: int) -> bool:
    """Whether `x` (..., H, W) has this size; while a graph of any size is exported, whether it always has."""
    rows, columns = x.shape[-2:]
    if torch.compiler.is_exporting():
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # only export needs its sympy

        return statically_known_true(rows == height) and statically_known_true(columns == width)
    return rows == height and columns == width


def crop(x: Tensor, height: int, width: int) -> Tensor:
    """The upper left (B, C, height, width) of `x` (B, C, H, W), as a view where no graph is exported.

    A slice that takes all at the size of the example would tie the graph to sizes where it takes all.
    """
    if torch.compiler.is_exporting():
        if has_size(x, height, width):
            return x
        rows, columns = (torch.arange(side, device=x.device) for side in (height, width))
        return x.index_select(2, rows).index_select(3, columns)
    return x[..., :height, :width]
