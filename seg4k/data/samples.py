"""Datasets: random crops for training, a grid of tiles for validation."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from seg4k.data.images import Image, Mask
from seg4k.data.sampling import PADDING, Key, sample_generator, scene_order
from seg4k.data.scenes import Scene, Window, read_window
from seg4k.data.transforms import Augment, Transform
from seg4k.data.unreadable import Reading, first_readable, name_once, noted
from seg4k.errors import UserError

Sample = dict[str, Any]
"""`image` uint8 or float32 (C, H, W), `mask` uint8 or int32 (H, W), `name` str."""


_SCAN_THREADS = 4
_ATTEMPTS = 16  # to find a scene that can be read
_REPLACEMENT = 2**40


class CropDataset(Dataset[Sample]):
    """Random crops of the training scenes; what a sample looks like depends on (seed, epoch, index) alone.

    Within an epoch scenes take turns: each is used once before any is used again. A share of the crops is
    instead placed on a pixel of a rare class: the class is drawn first, then a scene that has it, then the
    pixel, which lies within the middle half of the crop unless the border of the scene is near.

    A crop that is larger than its scene holds all of it; the rest is black and ignored. There is no length:
    an epoch has as many samples as its sampler takes.

    Attributes:
        reading: told which scene is read, where it is given.

    Args:
        scenes: where crops are read.
        size: height and width of a crop.
        seed: seed of the run.
        augment: what is changed at random.
        ignore_index: label of what lies beyond a scene.
        rare_share: share of crops that are placed on rare classes, 0 to 1.
        rare_scenes: for each rare class, by its label, the indices of the scenes that have it.
        skip_unreadable: whether a crop of a scene that cannot be read is replaced by one of another scene.
    """

    reading: Reading | None = None

    def __init__(
        self,
        scenes: Sequence[Scene],
        size: tuple[int, int],
        *,
        seed: int,
        augment: Augment,
        ignore_index: int,
        rare_share: float = 0.0,
        rare_scenes: dict[int, list[int]] | None = None,
        skip_unreadable: bool = False,
    ) -> None:
        self.scenes = scenes
        self.size = size
        self.seed = seed
        self.augment = augment
        self.ignore_index = ignore_index
        self.rare_share = rare_share
        self.rare_scenes = rare_scenes or {}
        self.skip_unreadable = skip_unreadable
        self._transform = Transform(augment, size) if augment.transforms else None
        self._order: tuple[tuple[int, int], NDArray[np.int64]] = ((-1, -1), np.empty(0, np.int64))

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        for attempt in range(_ATTEMPTS if self.skip_unreadable else 1):
            # Far from any index of an epoch, and as fixed by (seed, epoch, index) as the first one.
            replaced = index + attempt * _REPLACEMENT
            try:
                return self._crop(epoch, replaced, sample_generator(self.seed, epoch, replaced))
            except UserError as error:
                if not self.skip_unreadable or attempt == _ATTEMPTS - 1:
                    raise
                name_once(error)
        raise AssertionError

    def _crop(self, epoch: int, index: int, generator: np.random.Generator) -> Sample:
        height, width = self._window_size(generator)
        if self.rare_scenes and generator.random() < self.rare_share:
            scene, top, left = self._rare_place(height, width, generator)
        else:
            scene = self._scene_in_turn(epoch, index)
            top = _random_start(scene.size[0], height, generator)
            left = _random_start(scene.size[1], width, generator)
        with noted(self.reading, scene):
            image, mask = read_window(scene, Window(top, left, height, width), self.ignore_index)
        image, mask = _resize(image, mask, self.size)
        if self._transform is not None:
            image, mask = self._transform(image, mask, generator)
        return to_sample(image, mask, f"{scene.name}@{top},{left}")

    def _window_size(self, generator: np.random.Generator) -> tuple[int, int]:
        low, high = self.augment.scale
        if (low, high) == (1.0, 1.0):
            return self.size
        zoom = math.exp(generator.uniform(math.log(low), math.log(high)))
        return max(1, round(self.size[0] / zoom)), max(1, round(self.size[1] / zoom))

    def _scene_in_turn(self, epoch: int, index: int) -> Scene:
        turn, place = divmod(index, len(self.scenes))
        if self._order[0] != (epoch, turn):
            self._order = (epoch, turn), scene_order(self.seed, epoch, turn, len(self.scenes))
        return self.scenes[int(self._order[1][place])]

    def _rare_place(self, height: int, width: int, generator: np.random.Generator) -> tuple[Scene, int, int]:
        labels = sorted(self.rare_scenes)
        label = labels[int(generator.integers(len(labels)))]
        holders = self.rare_scenes[label]
        scene = self.scenes[holders[int(generator.integers(len(holders)))]]
        with noted(self.reading, scene):
            row, column = scene.place(label, generator)
        return (
            scene,
            _start_around(row, scene.size[0], height, generator),
            _start_around(column, scene.size[1], width, generator),
        )


class TileDataset(Dataset[Sample]):
    """Tiles that cover every pixel of the validation scenes exactly once.

    The last tile of a row or column reaches beyond its scene; what lies there is black and ignored. The index
    `PADDING` gives a tile that is ignored as a whole.

    Attributes:
        reading: told which scene is read, where it is given.

    Args:
        scenes: what is covered.
        size: height and width of a tile; None takes each scene as one tile.
        ignore_index: label of what lies beyond a scene.
        skip_unreadable: whether a tile of a scene that cannot be read is ignored as a whole.
    """

    reading: Reading | None = None

    def __init__(
        self,
        scenes: Sequence[Scene],
        size: tuple[int, int] | None,
        *,
        ignore_index: int,
        skip_unreadable: bool = False,
    ) -> None:
        self.scenes = scenes
        self.ignore_index = ignore_index
        self.skip_unreadable = skip_unreadable
        self.tiles: list[tuple[int, Window]] = [
            (number, window)
            for number, scene in enumerate(scenes)
            for window in tile_windows(scene.size, size)
        ]

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, key: Key | int) -> Sample:
        index = key if isinstance(key, int) else key[1]
        number, window = self.tiles[0 if index == PADDING else index]
        if index == PADDING:
            return self._ignored(window)
        scene = self.scenes[number]
        try:
            with noted(self.reading, scene):
                image, mask = read_window(scene, window, self.ignore_index)
        except UserError as error:
            if not self.skip_unreadable:
                raise
            name_once(error)
            return self._ignored(window)
        whole = window == (0, 0, *scene.size)
        return to_sample(image, mask, scene.name if whole else f"{scene.name}@{window.top},{window.left}")

    def _ignored(self, window: Window) -> Sample:
        """A black tile of the size of a window, of the type of any other."""

        def corner(scene: Scene) -> tuple[Image, Mask]:
            return read_window(scene, Window(0, 0, 1, 1), self.ignore_index)

        image, mask = first_readable(self.scenes, corner, skip=self.skip_unreadable)
        size = (window.height, window.width)
        return to_sample(
            np.zeros((*size, image.shape[2]), image.dtype),
            np.full(size, self.ignore_index, mask.dtype),
            "padding",
        )


def tile_windows(size: tuple[int, int], tile: tuple[int, int] | None) -> list[Window]:
    """The windows of a grid of tiles over a scene, row by row; one of the whole where `tile` is None."""
    height, width = tile or size
    return [
        Window(top, left, height, width)
        for top in range(0, size[0], height)
        for left in range(0, size[1], width)
    ]


def to_sample(image: Image, mask: Mask, name: str) -> Sample:
    """Copy into tensors: 8-bit images stay uint8, 16-bit ones become float32 in [0, 1]."""
    channels_first = np.empty((image.shape[2], *image.shape[:2]), image.dtype)
    cv2.split(image, list(channels_first))  # an eighth of the time of numpy's transposed copy
    if channels_first.dtype == np.uint16:
        channels_first = channels_first.astype(np.float32) / np.float32(65535)
    # torch has few operations for uint16.
    labels = mask.astype(np.uint8 if mask.dtype == np.uint8 else np.int32, order="C")
    return {"image": torch.from_numpy(channels_first), "mask": torch.from_numpy(labels), "name": name}


def find_rare(
    scenes: Sequence[Scene], classes: dict[str, int], *, skip_unreadable: bool = False
) -> dict[int, list[int]]:
    """For each class, given as name and label, the indices of the scenes that have it.

    Raises:
        UserError: where no scene has one of them, or a mask cannot be read and is not to be skipped.
    """

    def labels(scene: Scene) -> set[int]:
        try:
            return scene.labels()
        except UserError as error:
            if not skip_unreadable:
                raise
            name_once(error)
            return set()

    found: dict[int, list[int]] = {label: [] for label in classes.values()}
    with ThreadPoolExecutor(_SCAN_THREADS) as threads:  # decoding releases the interpreter
        for number, present in enumerate(threads.map(labels, scenes)):
            for label in found.keys() & present:
                found[label].append(number)
    for name, label in classes.items():
        if not found[label]:
            raise UserError(
                f"The rare class {name!r} is in no training mask; remove it from data.rare_classes, or set "
                "data.rare_crop_share=0."
            )
    return found


def _random_start(length: int, window: int, generator: np.random.Generator) -> int:
    return int(generator.integers(max(length - window, 0) + 1))


def _start_around(place: int, length: int, window: int, generator: np.random.Generator) -> int:
    """A start with `place` in the middle half of the window; the window stays within `length` if it can."""
    start = place - window // 2 + round(generator.uniform(-0.25, 0.25) * window)
    start = min(max(start, place - window + 1), place)  # small windows: rounding must not lose the place
    return min(max(start, 0), max(length - window, 0))


def _resize(image: Image, mask: Mask, size: tuple[int, int]) -> tuple[Image, Mask]:
    if mask.shape == size:
        return image, mask
    shrinks = mask.shape[0] > size[0]
    width_height = (size[1], size[0])
    image = cv2.resize(image, width_height, interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)
    # INTER_NEAREST takes the upper left corner of a pixel and would shift the mask against the image.
    mask = cv2.resize(mask, width_height, interpolation=cv2.INTER_NEAREST_EXACT)
    return (image[:, :, None] if image.ndim == 2 else image), mask
