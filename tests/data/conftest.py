import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import settings

from seg4k.data import blue_marble

# The first example may import a library; on a busy machine any example may be slow.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def marble(tmp_path_factory) -> Path:
    """Blue Marble, built once for all tests; not to be changed."""
    return blue_marble.prepare(tmp_path_factory.mktemp("marble") / "built")


@pytest.fixture
def make_folder(tmp_path):
    """Writes a data folder: images of noise whose masks follow from their pixels."""

    def make(
        train: int = 5, val: int = 3, size: tuple[int, int] = (40, 56), *, bits: int = 8, channels: int = 3
    ) -> Path:
        root = tmp_path / "set"
        generator = np.random.default_rng(0)
        for split, count in (("train", train), ("val", val)):
            (root / "images" / split).mkdir(parents=True)
            (root / "masks" / split).mkdir(parents=True)
            for number in range(count):
                image, mask = noise_pair(generator, size, bits, channels)
                write(root / "images" / split / f"{split}{number}.png", image)
                write(root / "masks" / split / f"{split}{number}.png", mask)
        write_classes(root)
        return root

    return make


def noise_pair(generator, size, bits=8, channels=3):
    dtype = np.uint8 if bits == 8 else np.uint16
    image = generator.integers(0, 2**bits, (*size, channels), dtype=dtype)
    mask = (image[:, :, 0] >> (bits - 8) > 200).astype(np.uint8) + (image[:, :, 0] >> (bits - 8) > 250)
    return image, mask.astype(np.uint8)


def write(path: Path, pixels: np.ndarray) -> None:
    """Write pixels whose colours are in the order RGB or RGBA."""
    if pixels.ndim == 3 and pixels.shape[2] == 3:
        pixels = pixels[:, :, ::-1]
    elif pixels.ndim == 3 and pixels.shape[2] == 4:
        pixels = pixels[:, :, [2, 1, 0, 3]]
    assert cv2.imwrite(str(path), np.ascontiguousarray(pixels))


def write_classes(root: Path, names=("low", "high", "top")) -> None:
    (root / "classes.json").write_text(json.dumps({"classes": list(names)}))
