"""Reading images and masks of any depth through OpenCV, as RGB, with errors that name the file."""

import io
import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from seg4k.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")

_PNG = b"\x89PNG\r\n\x1a\n"
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_BITS_PER_SAMPLE = 258

Image = NDArray[Any]
Mask = NDArray[Any]


class WrongDepthError(UserError):
    """A file whose values are neither 8- nor 16-bit."""


def read_image(path: Path | str) -> Image:
    """Read an image as stored: (H, W, C), uint8 or uint16, colours in the order RGB or RGBA.

    TIFF files of more than 4 channels are read by rasterio, where it is installed.

    Raises:
        UserError: where the file is missing, damaged, or neither 8- nor 16-bit.
    """
    return decode_image(read_bytes(path), Path(path))


def decode_image(data: NDArray[np.uint8], path: Path) -> Image:
    """As `read_image`, from the content of the file."""
    image = _decode(data, path)
    if image.ndim == 2:
        return image[:, :, None]
    if image.shape[2] == 3:
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))
    if image.shape[2] == 4:
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGRA2RGBA))
    return image


def grey_to_rgb(image: Image) -> Image:
    """An image (H, W, 1) repeated to three channels."""
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_GRAY2RGB))


def read_mask(path: Path | str) -> Mask:
    """Read a mask of class labels: (H, W), uint8 or uint16; of a PNG with a palette the indices into it.

    Raises:
        UserError: where the file is missing, damaged, or holds colours in place of labels.
    """
    return decode_mask(read_bytes(path), Path(path))


def decode_mask(data: NDArray[np.uint8], path: Path, colours: bool = False) -> Mask:
    """As `read_mask`, from the content of the file.

    With `colours` the mask is a colour image, and the result (H, W), uint32, is 65536 r + 256 g + b.

    Raises:
        UserError: where the file is damaged, or holds colours where labels are expected or the other way.
    """
    if colours:
        return _decode_colours(data, path)
    mask = _palette_indices(data)
    if mask is None:
        mask = _decode(data, path)
    if mask.ndim == 3:
        raise UserError(
            f"The mask {path} has {mask.shape[2]} channels (colours); a mask holds one class number per "
            "pixel: save it as an 8- or 16-bit image with one channel and no palette."
        )
    step = _grey_step(data)
    return mask // step if step else mask


def read_bytes(path: Path | str) -> NDArray[np.uint8]:
    """The content of a file.

    Raises:
        UserError: where it cannot be read.
    """
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); restore or remove the file."
        ) from None


def _decode_colours(data: NDArray[np.uint8], path: Path) -> NDArray[np.uint32]:
    image = _decode(data, path)
    if image.ndim == 2 or image.shape[2] < 3 or image.dtype != np.uint8:
        raise UserError(
            f"The mask {path} has {1 if image.ndim == 2 else image.shape[2]} channel(s) of "
            f"{image.dtype.itemsize * 8} bits; masks of this set are colour images of 8 bits."
        )
    # The bytes B, G, R, 0 are one little-endian number.
    four = image if image.shape[2] == 4 else cv2.cvtColor(image, cv2.COLOR_BGR2BGRA)
    return np.ascontiguousarray(four).view("<u4")[:, :, 0] & np.uint32(0xFFFFFF)


def _palette_indices(data: NDArray[np.uint8]) -> Mask | None:
    """The indices of a PNG with a palette, which OpenCV would turn into colours; None for any other file."""
    from PIL.PngImagePlugin import PngImageFile

    # The colour type stands in the header, which always comes first: 3 is a palette.
    if data[:8].tobytes() != _PNG or data[25:26].tobytes() != b"\x03" or _cut_short(data):
        return None
    try:
        # Not Image.open, which refuses large images: they are what this package is for.
        with PngImageFile(io.BytesIO(data.tobytes())) as image:
            return np.array(image)
    except (OSError, SyntaxError, ValueError):
        return None  # what is wrong is told by the decoder


def _grey_step(data: NDArray[np.uint8]) -> int:
    """By how much OpenCV multiplies the values of a grey PNG of 1, 2 or 4 bits, or a TIFF of 1; else 0."""
    if data[:4].tobytes() in _TIFF:
        return 255 if _bits_of_tiff(data) == 1 else 0
    if data[:8].tobytes() != _PNG or data[25:26].tobytes() != b"\x00":
        return 0
    return {1: 255, 2: 85, 4: 17}.get(int(data[24]), 0)


def _bits_of_tiff(data: NDArray[np.uint8]) -> int | None:
    """Bits of each value; None where the header cannot be understood."""
    from PIL.TiffImagePlugin import TiffImageFile

    try:
        with TiffImageFile(io.BytesIO(data.data)) as image:
            return int(image.tag_v2.get(_BITS_PER_SAMPLE, (1,))[0])
    except Exception:  # a kind that Pillow does not know
        return None


def list_images(source: Path | str) -> list[Path]:
    """A file, or the images of a folder and its subfolders in the order of their paths.

    Raises:
        UserError: where there is none.
    """
    source = Path(source)
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"{source}: no such file or folder")
    found = sorted(
        path
        for path in source.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
    if not found:
        raise UserError(f"The folder {source} holds no {'/'.join(SUFFIXES)} files; give another.")
    return found


def header_size(path: Path | str) -> tuple[int, int] | None:
    """Height and width from the file's header, without decoding; None where it cannot be understood."""
    from PIL import Image as PillowImage

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images are what this package is for
            with PillowImage.open(path) as image:
                width, height = image.size
    except Exception:  # whatever is wrong is told by the decoder, which has the last word
        return None
    return int(height), int(width)


def _decode(data: NDArray[np.uint8], path: Path) -> NDArray[Any]:
    if data.size == 0:
        raise UserError(f"{path} is empty (0 bytes); restore or remove the file.")
    whole = not _cut_short(data)
    try:
        image = cv2.imdecode(data, cv2.IMREAD_UNCHANGED) if whole else None
    except cv2.error:
        image = None
    if image is None and whole and path.suffix.lower() in (".tif", ".tiff"):
        image = _many_channels(path)
    if image is None:
        raise UserError(
            f"{path} cannot be decoded ({data.size:,} bytes: damaged, cut short, not "
            f"{'/'.join(SUFFIXES)}, or more than 4 channels without the package rasterio); restore, convert "
            "or remove the file."
        )
    if image.dtype not in (np.uint8, np.uint16):
        raise WrongDepthError(f"{path} holds {image.dtype} values; save it with 8 or 16 bits per channel.")
    return np.asarray(image)


def _many_channels(path: Path) -> NDArray[Any] | None:
    """A TIFF that OpenCV does not read, by rasterio; None where that cannot either."""
    from seg4k.data.rasters import open_raster, read_raster
    from seg4k.data.scenes import Window

    try:
        raster = open_raster(path)
        return read_raster(raster, Window(0, 0, *raster.size))[0] if raster.channels > 4 else None
    except UserError:
        return None


def _cut_short(data: NDArray[np.uint8]) -> bool:
    """Whether a JPEG or PNG lacks its end: the decoders fill the rest with grey and say nothing."""
    start, end = data[:8].tobytes(), data[-65536:].tobytes()
    if start.startswith(b"\xff\xd8"):
        return b"\xff\xd9" not in end
    return start == _PNG and b"IEND" not in end
