"""What a prediction leaves on disk: masks with a palette, overlays, probabilities."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from seg4k.data.classes import ClassTable
from seg4k.data.images import Image
from seg4k.errors import UserError
from seg4k.files import atomic_path

OVERLAY_SIDE = 4096  # longest side of an overlay; larger ones are shrunk
OPACITY = 0.5


def label_type(classes: ClassTable) -> np.dtype[Any]:
    """The smallest type that holds every label and the ignored one."""
    return np.dtype(np.uint8 if max(len(classes) - 1, classes.ignore_index) < 256 else np.uint16)


def write_mask(path: Path, labels: NDArray[Any], classes: ClassTable) -> None:
    """Write labels (H, W) as a PNG: with the class colours as palette, or 16-bit where labels pass 255.

    The pixels are the labels; the palette only says how viewers show them.
    """
    from PIL import Image as PillowImage

    with atomic_path(path) as temporary:
        if labels.dtype == np.uint8:
            image = PillowImage.fromarray(labels)
            palette = classes.palette() if classes.ignore_index < 256 else classes.palette()[:256]
            image.putpalette(palette.tobytes())
            image.save(temporary, compress_level=3)
        elif not cv2.imwrite(str(temporary), labels):
            raise UserError(f"{path} cannot be written as a PNG")


def write_overlay(path: Path, image: Image, labels: NDArray[Any], classes: ClassTable) -> None:
    """Write an image (h, w, C) with its labels (H, W) in the class colours over it, as a JPEG.

    Ignored pixels show the image alone. The labels are taken to the image's size by nearest.
    """
    shown = image[:, :, :3] if image.shape[2] >= 3 else np.repeat(image[:, :, :1], 3, axis=2)
    if shown.dtype == np.uint16:
        shown = (shown >> 8).astype(np.uint8)
    height, width = shown.shape[:2]
    shrink = min(1.0, OVERLAY_SIDE / max(height, width))
    size = (max(1, round(width * shrink)), max(1, round(height * shrink)))
    if shrink < 1:
        shown = cv2.resize(shown, size, interpolation=cv2.INTER_AREA)
    if labels.shape != shown.shape[:2]:
        labels = cv2.resize(labels, size, interpolation=cv2.INTER_NEAREST_EXACT)
    painted = cv2.addWeighted(shown, 1 - OPACITY, classes.to_rgb(labels), OPACITY, 0)
    painted[labels >= len(classes)] = shown[labels >= len(classes)]
    with atomic_path(path) as temporary:
        done = cv2.imwrite(
            str(temporary), np.ascontiguousarray(painted[:, :, ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 92]
        )
        assert done
