"""smp's U-Net decoder, block by block."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional as F

from seg4k.models.norm import replace_batch_norm


def upsample_nearest(x: Tensor, height: int, width: int) -> Tensor:
    """Nearest upsampling in the dtype of `x`: (B, C, h, w) to (B, C, height, width).

    Nearest interpolation only copies values, so it is exact in any dtype; autocast on CUDA would run it in
    float32 and double what a decoder block holds.
    """
    if torch.compiler.is_exporting():
        rows, columns = x.shape[-2:]
        if not statically_known_true(height == 2 * rows) or not statically_known_true(width == 2 * columns):
            return x.index_select(2, _nearest(rows, height)).index_select(3, _nearest(columns, width))
    with torch.autocast(x.device.type, enabled=False):
        return F.interpolate(x, size=(height, width), mode="nearest")


def _nearest(length: int, new: int) -> Tensor:
    """Where torch's nearest interpolation takes each of `new` rows from, (new,), with its rounding.

    Other runtimes divide by new / length where torch multiplies by length / new, both in float32: where the
    quotient is a whole number, as it often is for patches of 14 pixels, they may be off by one.
    """
    scale = torch.scalar_tensor(length, dtype=torch.float32) / torch.scalar_tensor(new, dtype=torch.float32)
    source = (torch.arange(new, dtype=torch.float32) * scale).floor().long()
    return source.clamp(max=length - 1)


class FusionConv(nn.Module):
    """Upsample, concatenate the skip, convolve: the first half of a decoder block.

    The three lie in one module so that no segment edge can fall between them: the concatenated copy would
    stay alive, twice the bytes of an edge before the upsampling.
    """

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, height: int, width: int, skip: Tensor | None = None) -> Tensor:
        """(B, C, h, w) and the skip (B, S, height, width) to (B, C', height, width)."""
        x = upsample_nearest(x, height, width)
        if skip is not None:
            x = torch.cat([x, skip], dim=1)
        return cast(Tensor, self.conv(x))


class DecoderBlock(nn.Module):
    """An smp `UnetDecoderBlock` whose two convolutions can be recomputed apart."""

    def __init__(self, in_channels: int, skip_channels: int, out_channels: int, norm: str) -> None:
        super().__init__()
        from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoderBlock

        block = replace_batch_norm(UnetDecoderBlock(in_channels, skip_channels, out_channels), norm)
        self.conv1 = FusionConv(cast(nn.Module, block.conv1))
        self.conv2 = cast(nn.Module, block.conv2)

    def forward(self, x: Tensor, height: int, width: int, skip: Tensor | None = None) -> Tensor:
        """(B, C, h, w) and the skip (B, S, height, width) to (B, C', height, width)."""
        return cast(Tensor, self.conv2(self.conv1(x, height, width, skip)))
