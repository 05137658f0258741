"""Reading images and masks of any depth through OpenCV, as RGB, with errors that name the file."""

import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from seg4k.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")

Image = NDArray[Any]
Mask = NDArray[Any]


def read_image(path: Path | str) -> Image:
    """Read an image as stored: (H, W, C), uint8 or uint16, colours in the order RGB or RGBA.

    Raises:
        UserError: where the file is missing, damaged, or neither 8- nor 16-bit.
    """
    image = _decode(Path(path))
    if image.ndim == 2:
        return image[:, :, None]
    if image.shape[2] == 3:
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))
    if image.shape[2] == 4:
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGRA2RGBA))
    return image


def read_mask(path: Path | str) -> Mask:
    """Read a mask of class labels: (H, W), uint8 or uint16; of a PNG with a palette the indices into it.

    Raises:
        UserError: where the file is missing, damaged, or holds colours in place of labels.
    """
    mask = _palette_indices(Path(path))
    if mask is None:
        mask = _decode(Path(path))
    if mask.ndim == 3:
        raise UserError(
            f"The mask {path} has {mask.shape[2]} channels (colours); a mask holds one class number per "
            "pixel: save it as an 8- or 16-bit image with one channel and no palette."
        )
    return mask


def _palette_indices(path: Path) -> Mask | None:
    """The indices of a PNG with a palette, which OpenCV would turn into colours; None for any other file."""
    from PIL import Image as PillowImage

    try:
        with path.open("rb") as file:
            head = file.read(26)
            # The colour type stands in the header, which always comes first: 3 is a palette.
            if head[:8] != b"\x89PNG\r\n\x1a\n" or head[25:26] != b"\x03":
                return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images are what this package is for
            with PillowImage.open(path) as image:
                return np.array(image)
    except (OSError, SyntaxError, ValueError):
        return None  # what is wrong is told by the decoder


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


def _decode(path: Path) -> NDArray[Any]:
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); restore or remove the file."
        ) from None
    try:
        image = cv2.imdecode(data, cv2.IMREAD_UNCHANGED) if data.size and not _cut_short(data) else None
    except cv2.error:
        image = None
    if image is None:
        raise UserError(
            f"{path} cannot be decoded ({data.size:,} bytes: damaged, cut short, not "
            f"{'/'.join(SUFFIXES)}, or more than 4 channels); restore, convert or remove the file."
        )
    if image.dtype not in (np.uint8, np.uint16):
        raise UserError(f"{path} holds {image.dtype} values; save it with 8 or 16 bits per channel.")
    return np.asarray(image)


def _cut_short(data: NDArray[np.uint8]) -> bool:
    """Whether a JPEG or PNG lacks its end: the decoders fill the rest with grey and say nothing."""
    start, end = data[:8].tobytes(), data[-65536:].tobytes()
    if start.startswith(b"\xff\xd8"):
        return b"\xff\xd9" not in end
    return start == b"\x89PNG\r\n\x1a\n" and b"IEND" not in end
