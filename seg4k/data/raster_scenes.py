"""Scenes larger than memory, of which each crop reads its own window."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seg4k.data.images import Image, Mask
from seg4k.data.labels import histogram
from seg4k.data.rasters import Raster, read_raster
from seg4k.data.scenes import PairReader, Window, size_error
from seg4k.errors import UserError

BLOCK = 2048  # of a pass over a whole scene: a side, in pixels


class RasterScene:
    """A GeoTIFF image with its mask, read by windows; where either has no data, the label is ignored.

    Args:
        name: what samples are called.
        image: the header of the image.
        mask: the header of the mask, of one band, or of three where masks are colours.
        reader: says what the set has, and what the values in the mask mean.

    Raises:
        UserError: where the two do not fit each other or the set.
    """

    def __init__(self, name: str, image: Raster, mask: Raster, reader: PairReader) -> None:
        self.name = name
        self.size = image.size
        self._image = image
        self._mask = mask
        self._reader = reader
        self._counts: list[tuple[Window, dict[int, int]]] | None = None
        if image.size != mask.size:
            raise size_error(image.path, image.size, mask.path, mask.size)
        check_mask(mask, reader.labelling.colours)
        reader.check(image.path, image.channels, image.dtype)

    def inside(self, window: Window) -> tuple[Image, Mask]:
        """Image (h, w, C) and mask (h, w) of a window inside it; nothing else is read."""
        image, valid = read_raster(self._image, window)
        values, known = read_raster(self._mask, window)
        return self._reader.coloured(image), mask_labels(self._reader, self._mask.path, values, valid & known)

    def labels(self) -> set[int]:
        """The labels that the mask holds; all of it is read once, block by block."""
        return {label for _, counts in self._blocks() for label in counts}

    def place(self, label: int, generator: np.random.Generator) -> tuple[int, int]:
        """Row and column of a random pixel with this label: its block first, by how many each has."""
        holders = [(window, counts[label]) for window, counts in self._blocks() if label in counts]
        edges = np.cumsum([count for _, count in holders])
        drawn = int(generator.integers(edges[-1]))
        number = int(np.searchsorted(edges, drawn, side="right"))
        window = holders[number][0]
        positions = np.flatnonzero(self.inside(window)[1] == label)
        row, column = divmod(int(positions[drawn - int(edges[number] - holders[number][1])]), window.width)
        return window.top + row, window.left + column

    def _blocks(self) -> list[tuple[Window, dict[int, int]]]:
        """The blocks of the scene, and how many pixels of each label they have."""
        if self._counts is None:
            self._counts = []
            for window in block_windows(self.size):
                counts = histogram(self.inside(window)[1])
                self._counts.append((window, {int(x): int(counts[x]) for x in np.flatnonzero(counts)}))
        return self._counts


def block_windows(size: tuple[int, int]) -> list[Window]:
    """Windows of at most `BLOCK` a side that cover a scene once, row by row."""
    return [
        Window(top, left, min(BLOCK, size[0] - top), min(BLOCK, size[1] - left))
        for top in range(0, size[0], BLOCK)
        for left in range(0, size[1], BLOCK)
    ]


def check_mask(mask: Raster, colours: bool) -> None:
    """Refuse a mask of another number of bands than its kind has.

    Raises:
        UserError: naming the file.
    """
    bands = 3 if colours else 1
    if mask.channels != bands or (colours and mask.dtype != np.uint8):
        raise UserError(
            f"The mask {mask.path} has {mask.channels} band(s) of {mask.dtype.itemsize * 8} bits where "
            f"{bands} {'of 8 bits ' if colours else ''}are expected; save the classes alone."
        )


def mask_labels(reader: PairReader, path: Path, values: NDArray[Any], valid: NDArray[np.bool_]) -> Mask:
    """Labels (h, w) of the bands (h, w, C) of a mask; ignored where not `valid` (h, w)."""
    labelling = reader.labelling
    if labelling.colours:
        wide = values.astype(np.uint32)
        plain = (wide[:, :, 0] << 16) | (wide[:, :, 1] << 8) | wide[:, :, 2]
    else:
        plain = values[:, :, 0]
    if valid.all():
        return labelling.apply(plain, path)
    # What stands where there are no data means nothing, and must not be taken for a mistake.
    labels = np.full(plain.shape, labelling.table.ignore_index, labelling.dtype(plain.dtype))
    if valid.any():
        labels[valid] = labelling.apply(plain[valid][:, None], path)[:, 0]
    return labels
