"""One pair of files read once: what is wrong with it, and what it holds."""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from seg4k.data.images import Image, WrongDepthError, decode_image, decode_mask, read_bytes
from seg4k.data.labels import histogram
from seg4k.data.raster_scenes import block_windows, check_mask, mask_labels
from seg4k.data.rasters import Raster, open_raster, read_raster
from seg4k.data.scenes import PairReader, size_error
from seg4k.errors import UserError

_HASH_BYTES = 16
_PIECE = 2**24


@dataclass(frozen=True)
class Fault:
    """Something that is wrong.

    Attributes:
        kind: `missing mask`, `extra mask`, `layout`, `unreadable`, `empty`, `bit depth`, `channels`, `size`,
            `label`, `duplicate` or `all ignored`.
        file: where.
        message: what, and how to mend it.
        fatal: whether training would fail of it, or a split that was asked for is not there.
    """

    kind: str
    file: Path
    message: str
    fatal: bool = True


@dataclass
class Moments:
    """Sums over pixels, by which mean and standard deviation of many images add up.

    Attributes:
        pixels: how many.
        first: sum of the values per channel, in [0, 1].
        second: sum of their squares.
    """

    pixels: int = 0
    first: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    second: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))

    def add(self, other: "Moments") -> None:
        """Add another's pixels."""
        self.pixels += other.pixels
        self.first = self.first + other.first
        self.second = self.second + other.second

    @property
    def mean(self) -> list[float]:
        """Per channel."""
        return [float(value) for value in self.first / self.pixels]

    @property
    def std(self) -> list[float]:
        """Per channel."""
        mean = self.first / self.pixels
        return [float(value) for value in np.sqrt(np.maximum(self.second / self.pixels - mean**2, 0))]


@dataclass
class Found:
    """What a pair holds; None or empty for what could not be read.

    Attributes:
        image: path of the image.
        faults: what is wrong with the pair by itself.
        size: height and width of the image.
        channels: of the image.
        dtype: of the image.
        digest: of the content of the image file.
        counts: label -> pixels.
        moments: of the image.
    """

    image: Path
    faults: list[Fault] = field(default_factory=list)
    size: tuple[int, int] | None = None
    channels: int | None = None
    dtype: np.dtype[Any] | None = None
    digest: str | None = None
    counts: dict[int, int] = field(default_factory=dict)
    moments: Moments | None = None


def scan_pair(image: Path, mask: Path | None, reader: PairReader) -> Found:
    """Read an image and its mask, if there is one, as a whole; each file is read once."""
    found = Found(image)
    data = _read(image, found)
    if data is not None:
        found.digest = hashlib.blake2b(data.data, digest_size=_HASH_BYTES).hexdigest()
        _image_of(found, data, reader)
    if mask is None:
        return found
    data = _read(mask, found)
    if data is None:
        return found
    colours = reader.labelling.colours
    values = _decoded(found, mask, lambda: decode_mask(data, mask, colours))
    if values is None or _damaged_png(data, mask, found):
        return found
    if found.size is not None and values.shape != found.size:
        found.faults.append(Fault("size", mask, str(size_error(image, found.size, mask, values.shape))))
    try:
        labels = reader.labelling.apply(values, mask)
    except UserError as error:
        found.faults.append(Fault("label", mask, str(error)))
        return found
    _count(found, labels)
    _all_ignored(found, mask, reader)
    return found


def scan_rasters(image: Path, mask: Path | None, reader: PairReader) -> Found:
    """As `scan_pair`, block by block, so that scenes need not fit in memory."""
    found = Found(image)
    pixels, truth = _header(found, image), None if mask is None else _header(found, mask)
    if pixels is not None:
        found.size, found.channels, found.dtype = pixels.size, pixels.channels, pixels.dtype
        found.digest = _digest(image)
    if truth is not None and mask is not None:
        try:
            check_mask(truth, reader.labelling.colours)
        except UserError as error:
            found.faults.append(Fault("channels", mask, str(error)))
            truth = None
        if truth is not None and pixels is not None and pixels.size != truth.size:
            message = str(size_error(image, pixels.size, mask, truth.size))
            found.faults.append(Fault("size", mask, message))
            truth = None
    if pixels is not None:
        _scan_blocks(found, pixels, truth, reader)
    return found


def _scan_blocks(found: Found, pixels: Raster, truth: Raster | None, reader: PairReader) -> None:
    moments = Moments()
    for window in block_windows(pixels.size):
        part = _decoded(found, pixels.path, partial(read_raster, pixels, window))
        if part is None:
            return
        image, valid = part
        moments.add(_moments(reader.coloured(image)))
        if truth is None:
            continue
        part = _decoded(found, truth.path, partial(read_raster, truth, window))
        if part is None:
            return
        values, known = part
        try:
            _count(found, mask_labels(reader, truth.path, values, valid & known))
        except UserError as error:
            found.faults.append(Fault("label", truth.path, str(error)))
            found.counts = {}
            truth = None
    found.moments = moments
    if truth is not None:
        _all_ignored(found, truth.path, reader)


def _header(found: Found, path: Path) -> Raster | None:
    raster: Raster | None = (
        None if _is_empty(path, found) else _decoded(found, path, lambda: open_raster(path))
    )
    return raster


def _read(path: Path, found: Found) -> NDArray[np.uint8] | None:
    data: NDArray[np.uint8] | None = _decoded(found, path, lambda: read_bytes(path))
    return None if data is None or (data.size == 0 and _is_empty(path, found)) else data


def _is_empty(path: Path, found: Found) -> bool:
    if not path.is_file() or path.stat().st_size > 0:
        return False
    found.faults.append(Fault("empty", path, f"{path} is empty (0 bytes); restore or remove the file."))
    return True


def _image_of(found: Found, data: NDArray[np.uint8], reader: PairReader) -> None:
    image = _decoded(found, found.image, lambda: decode_image(data, found.image))
    if image is not None and not _damaged_png(data, found.image, found):
        found.size, found.channels, found.dtype = image.shape[:2], image.shape[2], image.dtype
        found.moments = _moments(reader.coloured(image))


def _decoded(found: Found, path: Path, decode: Any) -> Any:  # noqa: ANN401 - what `decode` gives
    try:
        return decode()
    except WrongDepthError as error:
        found.faults.append(Fault("bit depth", path, str(error)))
    except UserError as error:
        found.faults.append(Fault("unreadable", path, str(error)))
    return None


def _damaged_png(data: NDArray[np.uint8], path: Path, found: Found) -> bool:
    """Whether a checksum in a PNG is wrong; decoders may go on regardless."""
    content = data.data
    if bytes(content[:8]) != b"\x89PNG\r\n\x1a\n":
        return False
    place = 8
    while place + 12 <= len(content):
        length = int.from_bytes(content[place : place + 4], "big")
        end = place + 8 + length
        if zlib.crc32(content[place + 4 : end]) != int.from_bytes(content[end : end + 4], "big"):
            message = (
                f"{path} is damaged (a checksum is wrong at byte {place:,}); restore or remove the file."
            )
            found.faults.append(Fault("unreadable", path, message))
            return True
        place = end + 4
    return False


def _moments(image: Image) -> Moments:
    most = float(np.iinfo(image.dtype).max)
    pixels = image.shape[0] * image.shape[1]
    means: list[float] = []
    squares: list[float] = []
    for part in _few_channels(image):
        mean, std = cv2.meanStdDev(part)
        means += (mean[:, 0] / most).tolist()
        squares += ((mean[:, 0] ** 2 + std[:, 0] ** 2) / most**2).tolist()
    return Moments(pixels, np.array(means) * pixels, np.array(squares) * pixels)


def _few_channels(image: Image) -> Iterator[Image]:
    """The image itself, or its channels one by one where OpenCV does not take so many."""
    if image.shape[2] <= 4:
        yield image
    else:
        for channel in range(image.shape[2]):
            yield np.ascontiguousarray(image[:, :, channel])


def _count(found: Found, labels: NDArray[Any]) -> None:
    counts = histogram(labels)
    for label in np.flatnonzero(counts):
        found.counts[int(label)] = found.counts.get(int(label), 0) + int(counts[label])


def _all_ignored(found: Found, mask: Path, reader: PairReader) -> None:
    if set(found.counts) == {reader.labelling.table.ignore_index}:
        message = f"The mask {mask} is ignored everywhere; nothing is learned from it: remove the pair."
        found.faults.append(Fault("all ignored", mask, message, fatal=False))


def _digest(path: Path) -> str:
    """Of a file that may be larger than memory."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
