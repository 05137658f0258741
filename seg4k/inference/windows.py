"""Sliding windows: blended by a Gaussian, in blocks that give what the whole would, flipped and scaled."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from seg4k.data.scenes import Window
from seg4k.errors import UserError

Scores = Callable[[Tensor], Tensor]
"""Images (B, C, h, w) to scores (B, classes, h, w)."""


class Cut(NamedTuple):
    """One piece of an axis: what is read, and the part of it whose every window lies inside."""

    read_start: int
    read_stop: int
    keep_start: int
    keep_stop: int


class Block(NamedTuple):
    """A piece of an image: the pixels that are read, and those of them that are kept."""

    read: Window
    keep: Window


def starts(length: int, window: int, step: int) -> list[int]:
    """Where the windows of an axis begin; the last one is moved back to end with the axis."""
    if length <= window:
        return [0]
    count = -(-(length - window) // step) + 1
    return [min(number * step, length - window) for number in range(count)]


def cuts(length: int, window: int, step: int, longest: int) -> list[Cut]:
    """Cut an axis into pieces of at most about `longest` pixels that see the same windows as the whole.

    A pixel is kept from a piece that holds all windows over it, so that windows at the edges of two pieces
    are computed twice and no edge can be seen.
    """
    begin = starts(length, window, step)
    found: list[Cut] = []
    keep, first = 0, 0
    while True:
        last = first
        while last + 1 < len(begin) and (
            begin[last + 1] + window - begin[first] <= longest
            or begin[last + 1] <= keep  # at least one pixel must be kept
        ):
            last += 1
        if last + 1 == len(begin):
            found.append(Cut(begin[first], length, keep, length))
            break
        found.append(Cut(begin[first], begin[last] + window, keep, begin[last + 1]))
        keep = begin[last + 1]
        while begin[first] + window <= keep:
            first += 1
    return found


def blocks(size: tuple[int, int], window: tuple[int, int], overlap: float, most_pixels: int) -> list[Block]:
    """Cut an image of `size` (H, W) into blocks of about `most_pixels`, each of two windows or more."""
    least_height = min(size[0], 2 * window[0])
    width = min(size[1], max(2 * window[1], min(round(most_pixels**0.5), most_pixels // least_height)))
    height = min(size[0], max(2 * window[0], most_pixels // width))
    rows = cuts(size[0], window[0], step_of(window[0], overlap), height)
    columns = cuts(size[1], window[1], step_of(window[1], overlap), width)
    return [
        Block(_window(row[:2], column[:2]), _window(row[2:], column[2:]))
        for row, column in itertools.product(rows, columns)
    ]


def least_block(size: tuple[int, int], window: tuple[int, int]) -> int:
    """Pixels of the smallest block that `blocks` makes of an image of `size`: two windows high and wide."""
    return min(size[0], 2 * window[0]) * min(size[1], 2 * window[1])


def step_of(window: int, overlap: float) -> int:
    """From one window to the next, in pixels, as MONAI has it."""
    return max(1, int(window * (1 - overlap)))


def _window(rows: tuple[int, ...], columns: tuple[int, ...]) -> Window:
    return Window(rows[0], columns[0], rows[1] - rows[0], columns[1] - columns[0])


def blend(
    scores: Scores,
    image: Tensor,
    window: tuple[int, int],
    overlap: float,
    batch: int,
    device: torch.device,
) -> Tensor:
    """Scores (classes, H, W) of an image (C, H, W) by windows, each weighed by a Gaussian about its middle.

    MONAI's `sliding_window_inference` with weights of our own, see `gaussian`. What an image smaller than the
    window lacks is black.

    Args:
        scores: computes a batch of windows on `device`.
        image: on the CPU; windows are moved to `device` batch by batch.
        window: height and width.
        overlap: of two neighbouring windows, as a share of a window.
        batch: windows computed at once.
        device: where they are computed; the result is on the CPU.

    Raises:
        UserError: where MONAI is not installed.
    """
    try:
        from monai.inferers.utils import sliding_window_inference
    except ImportError:
        raise UserError(
            "windows need the package monai: pip install 'seg4k[predict]', or predict images as a whole: "
            "window=whole"
        ) from None
    result = sliding_window_inference(
        image[None],
        window,
        batch,
        scores,
        overlap=overlap,
        roi_weight_map=gaussian(window),
        padding_mode="constant",
        sw_device=device,
        device=torch.device("cpu"),
    )
    assert isinstance(result, Tensor)
    return result[0]


def gaussian(window: tuple[int, int]) -> Tensor:
    """Weights (h, w) about the middle of a window, sigma an eighth of it.

    MONAI's own are cut off at 0.001 from below: near the borders of an image, where every weight is smaller
    than that, windows would then count alike, and their edges show.
    """
    rows, columns = (
        torch.exp(-((torch.arange(side) - (side - 1) / 2) ** 2) / (2 * (side / 8) ** 2)) for side in window
    )
    return torch.outer(rows, columns)


def augmented(scores: Scores, flips: Sequence[str], scales: Sequence[float]) -> Scores:
    """The mean of `scores` over mirror images and sizes.

    Args:
        scores: what is averaged.
        flips: `horizontal` and `vertical`, either or both; both give four images.
        scales: of height and width; 1.0 is the image itself.
    """
    axes = [axis for name, axis in (("vertical", -2), ("horizontal", -1)) if name in flips]
    mirrors = [
        list(chosen) for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)
    ]
    if len(mirrors) == 1 and list(scales) == [1.0]:
        return scores

    def mean(image: Tensor) -> Tensor:
        total: Tensor | None = None
        height, width = image.shape[-2:]
        for scale in scales:
            size = (max(1, round(height * scale)), max(1, round(width * scale)))
            scaled = _resize(image, size)
            for mirror in mirrors:
                one = _resize(scores(scaled.flip(mirror)).flip(mirror), (height, width))
                total = one if total is None else total.add_(one)
        assert total is not None
        return total.div_(len(mirrors) * len(scales))

    return mean


def _resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    if image.shape[-2:] == size:
        return image.clone()
    return F.interpolate(image, size, mode="bilinear", align_corners=False, antialias=True)
