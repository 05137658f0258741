"""Scenes: images with their masks, of any size, from which crops and tiles are read."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seg4k.data.cache import ArrayCache
from seg4k.data.images import Image, Mask, decode_mask, grey_to_rgb, read_bytes, read_image
from seg4k.data.labels import Labelling, distinct
from seg4k.errors import UserError


class Window(NamedTuple):
    """A rectangle of pixels; it may reach beyond its scene."""

    top: int
    left: int
    height: int
    width: int


class Scene(Protocol):
    """An image (H, W, C) with its mask (H, W)."""

    @property
    def name(self) -> str:
        """What messages and samples call it."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""

    def inside(self, window: Window) -> tuple[Image, Mask]:
        """Image (h, w, C) and mask (h, w) of a window that lies inside the scene; not to be written to."""

    def labels(self) -> set[int]:
        """The labels that its mask holds, the ignored one among them."""

    def place(self, label: int, generator: np.random.Generator) -> tuple[int, int]:
        """Row and column of one of the pixels with this label, each as likely as any other."""


def read_window(scene: Scene, window: Window, ignore_index: int) -> tuple[Image, Mask]:
    """A window of a scene: image (h, w, C) and mask (h, w), not to be written to.

    What lies beyond the scene is black in the image and `ignore_index` in the mask.
    """
    # At least one pixel, so that a window that lies wholly beyond the scene has a type and channels.
    top = min(max(window.top, 0), scene.size[0] - 1)
    left = min(max(window.left, 0), scene.size[1] - 1)
    bottom = max(min(window.top + window.height, scene.size[0]), top + 1)
    right = max(min(window.left + window.width, scene.size[1]), left + 1)
    image, mask = scene.inside(Window(top, left, bottom - top, right - left))
    moved = Window(window.top - top, window.left - left, window.height, window.width)
    return crop(image, moved), crop(mask, moved, ignore_index)


def crop(pixels: NDArray[Any], window: Window, fill: int = 0) -> NDArray[Any]:
    """A window of an array (H, W) or (H, W, C), not to be written to; `fill` lies beyond the array."""
    top, left = max(window.top, 0), max(window.left, 0)
    bottom = min(window.top + window.height, pixels.shape[0])
    right = min(window.left + window.width, pixels.shape[1])
    if (bottom - top, right - left) == (window.height, window.width):
        return pixels[top:bottom, left:right]
    wide = np.full((window.height, window.width, *pixels.shape[2:]), fill, pixels.dtype)
    if bottom > top and right > left:
        inside = (
            slice(top - window.top, bottom - window.top),
            slice(left - window.left, right - window.left),
        )
        wide[inside] = pixels[top:bottom, left:right]
    return wide


@dataclass
class PairReader:
    """Decodes and checks image and mask files; keeps the last few pairs, for tiles of one image.

    Attributes:
        labelling: what the values of masks mean.
        channels: channels that every image must have.
        dtype: type that every image must have, uint8 or uint16.
        grey: whether 8-bit images of one channel are taken too, and repeated to three.
        keep: decoded pairs kept in this process.
        cache: where decoded files are kept for all processes.
    """

    labelling: Labelling
    channels: int
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.uint8))
    grey: bool = False
    keep: int = 1
    cache: ArrayCache | None = None
    _kept: OrderedDict[tuple[Path, Path], tuple[Image, Mask]] = field(
        default_factory=OrderedDict, init=False, repr=False
    )

    def read(self, image_path: Path, mask_path: Path) -> tuple[Image, Mask]:
        """Image (H, W, C) and mask (H, W) of a pair; not to be written to.

        Raises:
            UserError: naming the file, where one is damaged, has other channels or another type than given,
                or the two do not fit each other or the classes.
        """
        key = (image_path, mask_path)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        image, mask = self._read_image(image_path), self.read_mask(mask_path)
        self.check(image_path, image.shape[2], image.dtype)
        image = self.coloured(image)
        if image.shape[:2] != mask.shape:
            raise size_error(image_path, image.shape[:2], mask_path, mask.shape)
        self._kept[key] = image, mask
        while len(self._kept) > self.keep:
            self._kept.popitem(last=False)
        return image, mask

    def check(self, path: Path, channels: int, dtype: np.dtype[Any]) -> None:
        """Refuse an image of other channels or another type than the set has.

        Raises:
            UserError: naming the file.
        """
        if not self.fits(channels, dtype):
            hint = f"set data.in_channels={channels} if all images are so"
            if {channels, self.channels} == {1, 3} and dtype == self.dtype == np.uint8:
                hint = "set data.in_channels=3, which takes grey images too"
            raise UserError(
                f"{path} has {channels} channels where {self.channels} are expected; convert it, or {hint}."
            )
        if dtype != self.dtype:
            raise UserError(
                f"{path} has {dtype.itemsize * 8} bits per channel where the first image has "
                f"{self.dtype.itemsize * 8}; convert one of them."
            )

    def fits(self, channels: int, dtype: np.dtype[Any]) -> bool:
        """Whether images of so many channels are taken."""
        return channels == self.channels or (self.grey and channels == 1 and dtype == np.uint8)

    def coloured(self, image: Image) -> Image:
        """The image with as many channels as the set has, where it is a grey one that is taken."""
        return grey_to_rgb(image) if self.grey and image.shape[2] == 1 and image.dtype == np.uint8 else image

    def read_mask(self, path: Path) -> Mask:
        """A mask (H, W) of labels, which are checked.

        Raises:
            UserError: naming the file and the value, where it has no class and is not ignored.
        """

        def read() -> Mask:
            return self.labelling.apply(decode_mask(read_bytes(path), path, self.labelling.colours), path)

        return read() if self.cache is None else self.cache.array(path, self.labelling.digest, read)

    def _read_image(self, path: Path) -> Image:
        if self.cache is None:
            return read_image(path)
        return self.cache.array(path, "image", lambda: read_image(path))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}


@dataclass(frozen=True)
class FileScene:
    """A pair of files, decoded when read."""

    name: str
    size: tuple[int, int]
    image_path: Path
    mask_path: Path
    reader: PairReader

    def arrays(self) -> tuple[Image, Mask]:
        """The whole image (H, W, C) and mask (H, W)."""
        image, mask = self.reader.read(self.image_path, self.mask_path)
        if mask.shape != self.size:
            raise UserError(f"{self.image_path} has changed its size while the run used it; start again.")
        return image, mask

    def inside(self, window: Window) -> tuple[Image, Mask]:
        """Image (h, w, C) and mask (h, w) of a window inside it."""
        image, mask = self.arrays()
        return crop(image, window), crop(mask, window)

    def labels(self) -> set[int]:
        """The labels that the mask holds; the image is not read."""
        return set(distinct(self.reader.read_mask(self.mask_path)))

    def place(self, label: int, generator: np.random.Generator) -> tuple[int, int]:
        """Row and column of a random pixel with this label."""
        return random_place(np.flatnonzero(self.arrays()[1] == label), self.size[1], generator)


class ArrayScene:
    """A mosaic of files that is decoded once per process and stays in memory.

    Args:
        name: what samples are called.
        grid: rows of pairs (image path, mask path) that, laid side by side, make the scene.
        size: height and width of the whole.
        reader: decodes the files.
    """

    def __init__(
        self,
        name: str,
        grid: Sequence[Sequence[tuple[Path, Path]]],
        size: tuple[int, int],
        reader: PairReader,
    ) -> None:
        self.name = name
        self.size = size
        self._grid = grid
        self._reader = reader
        self._arrays: tuple[Image, Mask] | None = None
        self._positions: dict[int, NDArray[np.int64]] = {}

    def arrays(self) -> tuple[Image, Mask]:
        """The whole image (H, W, C) and mask (H, W)."""
        if self._arrays is None:
            image = np.empty((*self.size, self._reader.channels), self._reader.dtype)
            mask = np.empty(self.size, np.uint8)
            top = 0
            for row in self._grid:
                left = 0
                for pair in row:
                    part, labels = self._reader.read(*pair)
                    height, width = labels.shape
                    image[top : top + height, left : left + width] = part
                    mask[top : top + height, left : left + width] = labels
                    left += width
                top += height
            self._arrays = image, mask
        return self._arrays

    def inside(self, window: Window) -> tuple[Image, Mask]:
        """Image (h, w, C) and mask (h, w) of a window inside it."""
        image, mask = self.arrays()
        return crop(image, window), crop(mask, window)

    def labels(self) -> set[int]:
        """The labels that the mask holds."""
        return set(distinct(self.arrays()[1]))

    def place(self, label: int, generator: np.random.Generator) -> tuple[int, int]:
        """Row and column of a random pixel with this label."""
        if label not in self._positions:
            self._positions[label] = np.flatnonzero(self.arrays()[1] == label)
        return random_place(self._positions[label], self.size[1], generator)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is started afresh decodes the files itself instead of being sent the pixels.
        return {**self.__dict__, "_arrays": None, "_positions": {}}


def random_place(positions: NDArray[np.int64], width: int, generator: np.random.Generator) -> tuple[int, int]:
    """Row and column of one of the flat positions (row * width + column)."""
    return divmod(int(positions[int(generator.integers(len(positions)))]), width)


def size_error(image: Path, image_size: Sequence[int], mask: Path, mask_size: Sequence[int]) -> UserError:
    """The message for a mask whose size (height, width) differs from its image's."""
    return UserError(
        f"The mask {mask} is {mask_size[1]}x{mask_size[0]} but its image {image} is "
        f"{image_size[1]}x{image_size[0]} (width x height); make them equal (resize the mask by nearest)."
    )
