"""From tokens of one stride to the pyramid that a U-Net decoder needs."""

import math
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from seg4k.models.norm import make_norm
from seg4k.models.sizes import has_size


class TokensToMap(nn.Module):
    """Patch tokens as a map; class and register tokens are dropped."""

    def __init__(self, prefix_tokens: int) -> None:
        super().__init__()
        self.prefix_tokens = prefix_tokens

    def forward(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        """Tokens (B, prefix + rows * columns, D) to (B, D, rows, columns)."""
        patches = tokens[:, self.prefix_tokens :]
        return patches.transpose(1, 2).reshape(tokens.shape[0], -1, rows, columns)


class NeckLevel(nn.Module):
    """Tokens to one level of the pyramid by transposed convolutions, as in UNETR (arXiv 2103.10504).

    Args:
        embed_dim: channels of the tokens.
        out_channels: channels of the level.
        doublings: how often the grid of patches is doubled. Where the patch is no power of two (14), what is
            left to the level's exact size is interpolated.
        prefix_tokens: class and register tokens before the patches.
        norm: `batch` or `group`, between two doublings.
    """

    def __init__(
        self, embed_dim: int, out_channels: int, doublings: int, prefix_tokens: int, norm: str
    ) -> None:
        super().__init__()
        self.to_map = TokensToMap(prefix_tokens)
        layers: list[nn.Module] = []
        channels = embed_dim
        for step in range(doublings):
            last = step == doublings - 1
            width = out_channels if last else max(out_channels, channels // 2)
            layers.append(nn.ConvTranspose2d(channels, width, kernel_size=2, stride=2))
            if not last:
                layers += [make_norm(norm, width), nn.GELU()]
            channels = width
        if not layers:
            layers.append(nn.Conv2d(embed_dim, out_channels, kernel_size=1))
        self.upsample = nn.Sequential(*layers)

    def forward(self, tokens: Tensor, rows: int, columns: int, height: int, width: int) -> Tensor:
        """Tokens (B, prefix + rows * columns, D) to (B, C, height, width)."""
        level = self.upsample(self.to_map(tokens, rows, columns))
        if not has_size(level, height, width):
            level = F.interpolate(level, size=(height, width), mode="bilinear", align_corners=False)
        return cast(Tensor, level)


class ImageLevel(nn.Sequential):
    """The stride-2 level, from the image itself: the detail that patches of 16 pixels lose.

    Image (B, C, H, W) to (B, out_channels, ceil(H / 2), ceil(W / 2)).
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1, bias=False),
            make_norm(norm, out_channels),
            nn.ReLU(inplace=True),
        )


def doublings(patch: int, stride: int) -> int:
    """How often a grid of patches is doubled to come nearest to `stride`; never negative."""
    return max(0, round(math.log2(patch / stride)))
