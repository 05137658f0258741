"""Checkpoints that load with nothing else: they carry classes, colours and the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import seg4k
from seg4k.data.classes import ClassTable
from seg4k.errors import UserError
from seg4k.models.vit_unet import ViTUNet, build_model

PREFIX = "model."


@dataclass(frozen=True)
class TrainedModel:
    """A segmenter read from a checkpoint, with what it needs to be used."""

    model: ViTUNet
    classes: ClassTable
    config: Mapping[str, Any]
    version: str


def describe(model: ViTUNet, classes: ClassTable, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of itself: plain values only, so that reading it runs no code."""
    return {
        "version": seg4k.__version__,
        "classes": classes.to_dict(),
        "in_channels": len(model.encoder.mean),
        "encoder": config["model"]["encoder"]["name"],
        "normalisation": {"mean": list(model.encoder.mean), "std": list(model.encoder.std)},
        "config": dict(config),
    }


def read_checkpoint(path: Path | str) -> dict[str, Any]:
    """Read a checkpoint without running code from it.

    Raises:
        UserError: no such file, not a file that can be read safely, or not written by seg4k.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"checkpoint={path}: no such file; runs write theirs to checkpoints/best.ckpt and last.ckpt"
        )
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling has errors of many kinds
        raise UserError(
            f"checkpoint={path}: damaged, or holds more than tensors and plain values, which is not loaded "
            f"({type(error).__name__}). Give a checkpoint that seg4k wrote."
        ) from error
    if not isinstance(content, dict) or "seg4k" not in content:
        raise UserError(f"checkpoint={path}: was not written by seg4k; give a run's checkpoints/best.ckpt")
    return content


def load_model(path: Path | str) -> TrainedModel:
    """The model of a checkpoint, in eval mode on the CPU.

    Raises:
        UserError: see `read_checkpoint`.
    """
    content = read_checkpoint(path)
    about = content["seg4k"]
    config = about["config"]
    classes = ClassTable.from_dict(about["classes"], f"checkpoint={path}")
    # The weights follow from the file: where the encoder's came from then does not matter now.
    settings = {**config["model"], "encoder": {**config["model"]["encoder"], "weights": "random"}}
    model = build_model(
        settings,
        num_classes=len(classes),
        image_size=tuple(config["data"]["image_size"]),
        in_channels=about["in_channels"],
    )
    state = {
        name.removeprefix(PREFIX): value
        for name, value in content["state_dict"].items()
        if name.startswith(PREFIX)
    }
    model.load_state_dict(state)
    return TrainedModel(model.eval(), classes, config, about["version"])
