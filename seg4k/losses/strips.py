"""Head, upsampling and loss strip by strip: the loss and gradients of whole logits that never exist.

The objectives are functions of sums over pixels, so the logits of a strip are needed only until they are
summed up, and once more in the backward pass, which computes them again. Nothing is approximated.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from seg4k.errors import UserError
from seg4k.losses.loss import SegmentationLoss, add_sums
from seg4k.losses.rows import ELEMENT_LIMIT, Rows, Strip
from seg4k.losses.terms import Sums

# Three tensors of just under 32 MiB: larger ones the C library gives back to the system, and fetches again
# page by page, which costs a CPU more than the recomputation does. Enough for a GPU to hide the launches.
DEFAULT_STRIP_BYTES = 96 * 2**20

# Modules without weights that treat each element alone, so that rows do not see each other.
_POINTWISE = (nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Mish)


def strip_loss(
    features: Tensor,
    head: nn.Module,
    target: Tensor,
    loss: SegmentationLoss,
    strips: int | str = "auto",
    *,
    upsample: int = 1,
    strip_bytes: int = DEFAULT_STRIP_BYTES,
    normalizer: Tensor | float | None = None,
) -> Tensor:
    """Return `loss(upsample(head(features))[..., :H, :W], target, normalizer)` without forming the logits.

    Args:
        features: (B, F, h, w), with h * upsample >= H and w * upsample >= W; what lies beyond is padding.
        head: convolutions of stride 1 that keep the size, and pointwise modules.
        target: (B, H, W) labels.
        loss: what is to be computed.
        strips: number of strips of rows; 1 is the plain computation, without recomputing anything; "auto" is
            the least number whose strips need no more than `strip_bytes`.
        upsample: factor of the bilinear upsampling (align_corners=False) after the head: 1, 2 or 4. It is
            computed in fp32.
        strip_bytes: bound on the bytes of one strip's temporaries, for "auto".
        normalizer: see `SegmentationLoss.finish`.

    Raises:
        UserError: where the head cannot be taken by strips, or one row holds 2^31 elements or more.
    """
    sums = strip_statistics(features, head, target, loss, strips, upsample=upsample, strip_bytes=strip_bytes)
    return loss.finish(sums, normalizer)


def strip_statistics(
    features: Tensor,
    head: nn.Module,
    target: Tensor,
    loss: SegmentationLoss,
    strips: int | str = "auto",
    *,
    upsample: int = 1,
    strip_bytes: int = DEFAULT_STRIP_BYTES,
) -> Sums:
    """Return `loss.statistics` of all pixels, to be finished later; arguments as for `strip_loss`."""
    rows = _rows(features, head, tuple(target.shape[1:]), upsample, strips)
    count = rows.count(strips, strip_bytes)

    def statistics(features: Tensor, target: Tensor, strip: Strip) -> Sums:
        return loss.statistics(_logits(features, head, rows, strip), target)

    if count == 1:
        return statistics(features, target, rows.strip(0, rows.height))
    total: Sums | None = None
    for strip in rows.cut(count):
        part, features = _take_rows(features, strip.feature_start, strip.feature_stop)
        part_target = target[:, strip.start : strip.stop]
        # Tensors go by position, where a change in place before the backward pass raises. Nothing is random.
        sums = checkpoint(statistics, part, part_target, strip, use_reentrant=False, preserve_rng_state=False)
        total = add_sums(total, sums)
    assert total is not None
    return total


@torch.no_grad()
def predict_strips(
    features: Tensor,
    head: nn.Module,
    size: tuple[int, int],
    strips: int | str = "auto",
    *,
    upsample: int = 1,
    strip_bytes: int = DEFAULT_STRIP_BYTES,
) -> Tensor:
    """Return the predicted labels (B, H, W), int64, of an image of `size` (H, W), without forming the logits.

    The argmax over the channels; for a single channel 1 where the logit is above 0. Arguments as for
    `strip_loss`.
    """
    rows = _rows(features, head, size, upsample, strips)
    labels = torch.empty(rows.batch, *size, dtype=torch.int64, device=features.device)
    for strip in rows.cut(rows.count(strips, strip_bytes)):
        part = features[:, :, strip.feature_start : strip.feature_stop]
        labels[:, strip.start : strip.stop] = _labels(_logits(part, head, rows, strip))
    return labels


@torch.no_grad()
def evaluate_strips(
    features: Tensor,
    head: nn.Module,
    target: Tensor,
    loss: SegmentationLoss,
    strips: int | str = "auto",
    *,
    upsample: int = 1,
    strip_bytes: int = DEFAULT_STRIP_BYTES,
) -> tuple[Tensor, Sums]:
    """Return the labels of `predict_strips` and the statistics of `loss` together, from one pass of the head.

    The statistics of several batches add up (`add_sums`); finished, they are the loss of the whole set,
    independent of how it was cut into batches.
    """
    size = (target.shape[1], target.shape[2])
    rows = _rows(features, head, size, upsample, strips)
    labels = torch.empty(target.shape, dtype=torch.int64, device=features.device)
    total: Sums | None = None
    for strip in rows.cut(rows.count(strips, strip_bytes)):
        logits = _logits(features[:, :, strip.feature_start : strip.feature_stop], head, rows, strip)
        labels[:, strip.start : strip.stop] = _labels(logits)
        total = add_sums(total, loss.statistics(logits, target[:, strip.start : strip.stop]))
    assert total is not None
    return labels, total


def upsample_logits(logits: Tensor, factor: int) -> Tensor:
    """Upsample logits (B, C, h, w) bilinearly to (B, C, h * factor, w * factor), in fp32 (fp64 stays)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if factor == 1:
        return logits
    return F.interpolate(logits, scale_factor=factor, mode="bilinear", align_corners=False)


def _labels(logits: Tensor) -> Tensor:
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


def _logits(features: Tensor, head: nn.Module, rows: Rows, strip: Strip) -> Tensor:
    """Logits (B, C, strip rows, W) from the strip's feature rows (B, F, rows read, w)."""
    device = features.device.type
    # Autocast would share one bf16 copy of the weights between the strips and add up their gradients in bf16.
    with torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    ):
        logits = head(features)
    if logits.shape[2:] != features.shape[2:] or logits.shape[1] != rows.channels:
        raise ValueError(
            f"the head made {tuple(logits.shape)} of {tuple(features.shape)}: it must keep the size"
        )
    # The rows of the halo went by the head's own zero padding, except at the true borders, where it belongs.
    logits = logits[:, :, strip.head_start - strip.feature_start : strip.head_stop - strip.feature_start]
    logits = upsample_logits(logits, rows.upsample)
    first = strip.head_start * rows.upsample
    return logits[:, :, strip.start - first : strip.stop - first, : rows.width]


def _rows(features: Tensor, head: nn.Module, size: tuple[int, ...], upsample: int, strips: int | str) -> Rows:
    batch, channels, height, width = features.shape
    if upsample not in (1, 2, 4):
        raise UserError(f"model.head.stride must be 1, 2 or 4, got {upsample}")
    if height * upsample < size[0] or width * upsample < size[1]:
        raise ValueError(f"features {tuple(features.shape)} times {upsample} do not cover {tuple(size)}")
    convolutions = [module for module in head.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        raise UserError("the head has no Conv2d: give it one that makes the logits")
    rows = Rows(
        batch=batch,
        feature_channels=channels,
        feature_height=height,
        feature_width=width,
        feature_bytes=features.element_size(),
        channels=convolutions[-1].out_channels,
        height=size[0],
        width=size[1],
        upsample=upsample,
        halo=height,
    )
    if strips == 1 and rows.largest(rows.height) < ELEMENT_LIMIT:
        return rows  # in one piece, which reads all rows, any head will do
    return replace(rows, halo=head_halo(head))


def head_halo(head: nn.Module) -> int:
    """Return how many rows above and below each of its rows the head looks at.

    Raises:
        UserError: where the head holds a module that may see further than a convolution of stride 1, or in a
            way that is not known here.
    """
    halo = 0
    for name, module in head.named_modules():
        if isinstance(module, nn.Conv2d):
            reach = module.dilation[0] * (module.kernel_size[0] - 1)
            padding = module.padding
            same = padding == "same" or (not isinstance(padding, str) and 2 * padding[0] == reach)
            if module.stride != (1, 1) or reach % 2 or not same or module.padding_mode == "circular":
                raise UserError(
                    f"the head's convolution {name or module} does not keep the rows (stride 1, odd kernel, "
                    "padding of half its reach): change it, or set loss.strips=1"
                )
            halo += reach // 2
        elif not (isinstance(module, _POINTWISE) or next(module.children(), None) is not None):
            raise UserError(
                f"the head's {name or 'module'} ({type(module).__name__}) cannot be computed strip by strip: "
                "use convolutions and activations only, or set loss.strips=1"
            )
    return halo


def _take_rows(features: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return rows [start, stop) of features (B, F, h, w), and the features again for the next strip.

    Plain slices would each give the features a gradient of full size, mostly zeros. Taken in a chain, the
    last strip makes one such tensor and hands it on, and each strip before adds its rows to it.
    """
    take: Any = _TakeRows.apply
    part, rest = take(features, start, stop)
    return part, rest


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        ctx.set_materialize_grads(False)
        ctx.rows = slice(start, stop)
        ctx.shape = features.shape
        last = not features.is_contiguous() and features.is_contiguous(memory_format=torch.channels_last)
        ctx.memory_format = torch.channels_last if last else torch.contiguous_format
        return features[:, :, start:stop], features.view_as(features)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_part: Tensor | None,
        grad_rest: Tensor | None,
    ) -> tuple[Tensor | None, None, None]:
        if grad_part is None:
            return grad_rest, None, None
        if grad_rest is None:
            empty = torch.empty(
                ctx.shape, dtype=grad_part.dtype, device=grad_part.device, memory_format=ctx.memory_format
            )
            grad_rest = empty.zero_()
        # This tensor was made by the strip after this one, and nothing else holds it.
        grad_rest[:, :, ctx.rows] += grad_part
        return grad_rest, None, None
