"""The prediction of one image, in memory or block by block."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seg4k.data.images import Image, grey_to_rgb, read_image
from seg4k.data.rasters import Raster, RasterWriter, open_raster, read_raster, read_small
from seg4k.data.scenes import Window
from seg4k.errors import UserError
from seg4k.files import atomic_path
from seg4k.inference.memory import WholeImages
from seg4k.inference.outputs import OVERLAY_SIDE, label_type, write_mask, write_overlay
from seg4k.inference.segmenter import Segmenter
from seg4k.inference.windows import Block, augmented, blend, blocks, least_block


@dataclass(frozen=True)
class Options:
    """How images are predicted; conf/predict.yaml says what each means."""

    window: tuple[int, int] | str = "auto"
    overlap: float = 0.25
    window_batch: int = 1
    flips: tuple[str, ...] = ()
    scales: tuple[float, ...] = (1.0,)
    overlays: bool = True
    probabilities: bool = False
    block_bytes: int = 2**30

    @property
    def plain(self) -> bool:
        """Whether labels are all that is needed of a single pass."""
        return not self.flips and self.scales == (1.0,) and not self.probabilities


class Predictor:
    """Predicts arrays of pixels: a whole at once, or by windows."""

    def __init__(self, segmenter: Segmenter, options: Options) -> None:
        self.segmenter = segmenter
        self.options = options
        self._whole = WholeImages(segmenter)
        self._wholes = True
        self._said: set[str] = set()
        self._scores = augmented(segmenter.probabilities, options.flips, options.scales)

    def window(self, size: tuple[int, int]) -> tuple[int, int] | None:
        """The window for an image of `size`; None takes it as a whole."""
        chosen = self.options.window
        if chosen == "whole":
            return None
        if isinstance(chosen, tuple):
            return None if size[0] <= chosen[0] and size[1] <= chosen[1] else chosen
        largest = max(1.0, *self.options.scales)
        scaled = (round(size[0] * largest), round(size[1] * largest))
        if self._wholes and self._whole.fit(*scaled, scores=not self.options.plain):
            return None
        return self._smaller(size)

    def give_up_wholes(self) -> bool:
        """See no image whole any more; whether that changes anything."""
        changes = self._wholes and self.options.window == "auto"
        self._wholes = False
        return changes

    def _smaller(self, size: tuple[int, int]) -> tuple[int, int]:
        """The training size, halved until a block of its windows takes about `block_bytes`, at most twice."""
        height, width = (int(side) for side in self.segmenter.config["data"]["image_size"])
        trained = (height, width)
        rows, columns = self.segmenter.model.encoder.patch_size
        while (
            least_block(size, (height, width)) > 2 * self._most_pixels and height > rows and width > columns
        ):
            height, width = (
                -(-side // 2 // patch) * patch for side, patch in ((height, rows), (width, columns))
            )
        if (height, width) != trained:
            self._say(
                f"windows of {height}x{width}; those of the training size, {trained[0]}x{trained[1]}, would "
                f"take {self._block_gib(size, trained):.1f} GiB: raise block_bytes to have them"
            )
        return height, width

    @property
    def _most_pixels(self) -> int:
        """Of a block of `block_bytes`."""
        # MONAI's sum, its weights and its mean; the pixels, as read and as float.
        bytes_per_pixel = 4 * (2 * len(self.segmenter.classes) + 2) + 8 * self.segmenter.in_channels
        return self.options.block_bytes // bytes_per_pixel

    def _block_gib(self, size: tuple[int, int], window: tuple[int, int]) -> float:
        return least_block(size, window) / max(1, self._most_pixels) * self.options.block_bytes / 2**30

    def _say(self, text: str) -> None:
        """Print a remark once."""
        if text not in self._said:
            self._said.add(text)
            print(f"seg4k: {text}", file=sys.stderr, flush=True)

    def labels(self, pixels: Image) -> NDArray[np.int64]:
        """Labels (H, W) of a whole image (H, W, C), without forming its scores."""
        found: NDArray[np.int64] = self.segmenter.labels(_tensor(pixels)[None])[0].cpu().numpy()
        return found

    def scores(self, pixels: Image, window: tuple[int, int] | None) -> Tensor:
        """Probabilities (classes, H, W), float32 on the CPU, of an image (H, W, C)."""
        image = _tensor(pixels)
        with torch.inference_mode():
            if window is None:
                return self._scores(image[None].to(self.segmenter.device))[0].cpu()
            options = self.options
            return blend(
                self._scores, image, window, options.overlap, options.window_batch, self.segmenter.device
            )

    def blocks(self, size: tuple[int, int], window: tuple[int, int] | None) -> list[Block]:
        """The pieces in which an image is predicted, each with scores of at most about `block_bytes`."""
        whole = Window(0, 0, *size)
        if window is None:
            return [Block(whole, whole)]
        if window == self.options.window and least_block(size, window) > 2 * self._most_pixels:
            self._say(
                f"window={list(window)}: a block of four windows takes "
                f"{self._block_gib(size, window):.1f} GiB, more than block_bytes="
                f"{self.options.block_bytes}; smaller windows take less"
            )
        return blocks(size, window, self.options.overlap, self._most_pixels)


def predict_array(
    predictor: Predictor, image_path: Path, mask: Path, overlay: Path, probabilities: Path
) -> None:
    """Predict an image that fits in memory, and write its mask last.

    Raises:
        UserError: where the image is damaged or has other channels than the model takes.
    """
    image = read_image(image_path)
    if predictor.segmenter.takes_grey(image):
        image = grey_to_rgb(image)
    _check_channels(image_path, image.shape[2], predictor.segmenter)
    classes, options = predictor.segmenter.classes, predictor.options
    size = image.shape[:2]
    labels = np.empty(size, label_type(classes))
    with ExitStack() as files:
        kept = _memory_map(files, probabilities, predictor, size)
        for window, part in _pieces(predictor, size, lambda place: _slice(image, place), kept):
            labels[_rows_columns(window)] = part
    if options.overlays:
        write_overlay(overlay, image, labels, classes)
    write_mask(mask, labels, classes)


def predict_raster(
    predictor: Predictor, image_path: Path, mask: Path, overlay: Path, probabilities: Path
) -> None:
    """Predict a GeoTIFF scene block by block; its mask has its CRS and transform, nodata is ignored.

    Raises:
        UserError: where the scene is damaged or has other bands than the model takes.
    """
    raster = open_raster(image_path)
    _check_channels(image_path, raster.channels, predictor.segmenter)
    classes, options = predictor.segmenter.classes, predictor.options
    dtype = label_type(classes)
    small = np.full(_small_size(raster), classes.ignore_index, dtype)
    valid: dict[Window, NDArray[np.bool_]] = {}

    def read(place: Window) -> Image:
        pixels, valid[place] = read_raster(raster, place)
        return pixels

    with ExitStack() as files:
        temporary = files.enter_context(atomic_path(mask))
        kept = _memory_map(files, probabilities, predictor, raster.size)
        writer = RasterWriter(temporary, raster, classes.palette()[:256], classes.ignore_index, dtype)
        files.callback(writer.close)
        for window, part in _pieces(predictor, raster.size, read, kept):
            ((place, data),) = valid.items()
            valid.clear()
            top, left = window.top - place.top, window.left - place.left
            inside = data[top : top + window.height, left : left + window.width]
            labels = np.where(inside, part, classes.ignore_index).astype(dtype)
            writer.write(window, labels)
            _paste_small(small, labels, window, raster.size)
        if options.overlays:
            write_overlay(overlay, read_small(raster, small.shape), small, classes)


def _pieces(
    predictor: Predictor,
    size: tuple[int, int],
    read: Callable[[Window], Image],
    kept: NDArray[Any] | None,
) -> Iterator[tuple[Window, NDArray[Any]]]:
    """Labels (h, w) of each block with its place; probabilities go into `kept`."""
    window = predictor.window(size)
    for block in predictor.blocks(size, window):
        pixels = read(block.read)
        if window is None and predictor.options.plain:
            yield block.keep, predictor.labels(pixels)
            continue
        top, left = block.keep.top - block.read.top, block.keep.left - block.read.left
        inside = (slice(top, top + block.keep.height), slice(left, left + block.keep.width))
        scores = predictor.scores(pixels, window)[:, inside[0], inside[1]]
        if kept is not None:
            kept[:, *_rows_columns(block.keep)] = scores.half().numpy()
        yield block.keep, scores.argmax(0).numpy()


def _memory_map(
    files: ExitStack, path: Path, predictor: Predictor, size: tuple[int, ...]
) -> NDArray[Any] | None:
    """A file (classes, H, W) of float16 for the probabilities, larger than memory if need be."""
    if not predictor.options.probabilities:
        return None
    temporary = files.enter_context(atomic_path(path))
    shape = (len(predictor.segmenter.classes), *size)
    found = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float16, shape=shape)
    files.callback(found.flush)
    return found


def _tensor(pixels: Image) -> Tensor:
    """An image (H, W, C) of 8 or 16 bits as float32 (C, H, W) in [0, 1]."""
    channels_first = torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels, 2, 0)).astype(np.float32))
    return channels_first.div_(65535 if pixels.dtype == np.uint16 else 255)


def _check_channels(path: Path, channels: int, segmenter: Segmenter) -> None:
    if channels != segmenter.in_channels:
        raise UserError(
            f"{path} has {channels} channels, but the checkpoint takes {segmenter.in_channels}; convert it."
        )


def _rows_columns(window: Window) -> tuple[slice, slice]:
    return (
        slice(window.top, window.top + window.height),
        slice(window.left, window.left + window.width),
    )


def _slice(image: Image, window: Window) -> Image:
    return image[_rows_columns(window)]


def _small_size(raster: Raster) -> tuple[int, int]:
    shrink = min(1.0, OVERLAY_SIDE / max(raster.size))
    return max(1, round(raster.size[0] * shrink)), max(1, round(raster.size[1] * shrink))


def _paste_small(small: NDArray[Any], labels: NDArray[Any], window: Window, size: tuple[int, int]) -> None:
    """Put the labels of a block into the shrunken mask of the overlay, by nearest."""
    picked = []
    for axis, start, length in ((0, window.top, window.height), (1, window.left, window.width)):
        # The full row or column in the middle of each shrunken one.
        centres = ((np.arange(small.shape[axis]) + 0.5) * size[axis] / small.shape[axis]).astype(np.int64)
        inside = np.flatnonzero((centres >= start) & (centres < start + length))
        picked.append((inside, centres[inside] - start))
    (rows, from_rows), (columns, from_columns) = picked
    small[np.ix_(rows, columns)] = labels[np.ix_(from_rows, from_columns)]
