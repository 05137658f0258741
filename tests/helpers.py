"""What several tests need: a composed configuration and a tiny data set on disk."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from seg4k.cli import conf_directory

CLASSES = {
    "classes": [
        {"name": "left", "colour": [200, 30, 30]},
        {"name": "right", "colour": [30, 30, 200]},
        {"name": "nowhere", "colour": [0, 255, 0]},
    ],
    "ignore_index": 255,
}


def make_folder(root: Path, train: int = 4, val: int = 3, size: tuple[int, int] = (48, 72)) -> Path:
    """A data set that a few steps can learn: the class is the half of the image, and so is the colour."""
    random = np.random.default_rng(0)
    height, width = size
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            mask = np.zeros(size, np.uint8)
            mask[:, width // 2 :] = 1
            image = random.integers(0, 60, (height, width, 3), dtype=np.uint8)
            image[:, width // 2 :, 2] += 150
            mask[:3] = 255
            cv2.imwrite(str(root / "images" / split / f"{index}.png"), image)
            cv2.imwrite(str(root / "masks" / split / f"{index}.png"), mask)
    (root / "classes.json").write_text(json.dumps(CLASSES))
    return root


def configuration(*overrides: str) -> dict[str, Any]:
    """The configuration that the command line would compose, as plain values."""
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_directory())):
        composed = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    assert isinstance(composed, dict)
    return composed


def smoke(root: Path, *overrides: str) -> dict[str, Any]:
    """experiment=smoke on the folder at `root`."""
    return configuration(
        "experiment=smoke",
        "data=folder",
        f"data.root={root}",
        "data.image_size=[32,48]",
        "data.val_size=null",
        *overrides,
    )
