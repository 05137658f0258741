"""The normalisation of neck and decoder."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seg4k.errors import UserError

NORMS = ("batch", "group")


class GroupNorm2d(nn.GroupNorm):
    """Group norm that stays in the dtype of its input under autocast.

    Autocast on CUDA would run it in float32 and so keep an input and an output of twice the size. The kernels
    accumulate in float32 whatever the dtype of the input.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(math.gcd(32, channels), channels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to the same, in the same dtype."""
        with torch.autocast(x.device.type, enabled=False):
            return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def make_norm(kind: str, channels: int) -> nn.Module:
    """`batch` or `group` normalisation over (B, channels, H, W)."""
    if kind not in NORMS:
        raise UserError(f"model.decoder.norm={kind}: choose one of {', '.join(NORMS)}")
    return nn.BatchNorm2d(channels) if kind == "batch" else GroupNorm2d(channels)


def replace_batch_norm(module: nn.Module, kind: str) -> nn.Module:
    """Replace each BatchNorm2d inside `module` by this norm, for libraries that offer no choice."""
    if kind != "batch":
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, make_norm(kind, child.num_features))
            else:
                replace_batch_norm(child, kind)
    return module
