"""A trained model ready to be used: on its device, at its precision, without gradients."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seg4k.data.classes import ClassTable
from seg4k.data.images import Image
from seg4k.data.settings import as_path
from seg4k.errors import UserError
from seg4k.losses.strips import predict_strips
from seg4k.models.vit_unet import ViTUNet
from seg4k.training.weights import load_model

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ACCELERATORS = ("auto", "cpu", "gpu")


@dataclass(frozen=True)
class Segmenter:
    """A model in eval mode with its classes.

    Attributes:
        model: the network, on `device`.
        classes: names and colours of its classes.
        config: the configuration that it was trained by.
        device: where it computes.
        precision: `fp32`, `bf16` or `fp16`; a model trained in fp64 is used in fp32.
    """

    model: ViTUNet
    classes: ClassTable
    config: Mapping[str, Any]
    device: torch.device
    precision: str

    @property
    def in_channels(self) -> int:
        """Channels of the images that it takes."""
        return len(self.model.encoder.mean)

    def takes_grey(self, image: Image) -> bool:
        """Whether an image (H, W, C) is a grey one to repeat to three channels, as training does."""
        return self.in_channels == 3 and image.shape[2] == 1 and image.dtype == np.uint8

    @torch.inference_mode()
    def labels(self, image: Tensor) -> Tensor:
        """Labels (B, H, W), int64 on `device`, of an image (B, C, H, W), uint8 or float in [0, 1].

        The logits of the whole are never formed: the argmax is taken strip by strip.
        """
        with self._autocast():
            features = self.model.forward_features(image.to(self.device))
            return predict_strips(
                features,
                self.model.head,
                (image.shape[-2], image.shape[-1]),
                upsample=self.model.head_stride,
            )

    @torch.inference_mode()
    def probabilities(self, image: Tensor) -> Tensor:
        """Probabilities (B, classes, H, W), float32 on `device`, of an image (B, C, H, W)."""
        with self._autocast():
            logits: Tensor = self.model(image.to(self.device))
        return logits.float().softmax(dim=1)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = DTYPES[self.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)


def load_segmenter(
    checkpoint: Path | str | None, accelerator: str = "auto", precision: str | None = None
) -> Segmenter:
    """Load a checkpoint for use.

    Args:
        checkpoint: a file that a run wrote.
        accelerator: `auto` (the GPU if there is one), `cpu` or `gpu`.
        precision: `fp32`, `bf16`, `fp16`; None takes the one that it was trained in, fp32 for fp64.

    Raises:
        UserError: for a checkpoint that is missing or damaged, or a value that is not one of these.
    """
    if not checkpoint:
        raise UserError("checkpoint must be set: checkpoint=outputs/NAME/DATE_TIME/checkpoints/best.ckpt")
    if precision is not None and precision not in DTYPES:
        raise UserError(f"precision={precision}: choose one of {', '.join(DTYPES)}")
    device = choose_device(accelerator)
    trained = load_model(as_path("checkpoint", checkpoint))
    if precision is None:
        precision = trained.config["precision"] if trained.config["precision"] in DTYPES else "fp32"
    return Segmenter(
        trained.model.to(device),
        trained.classes,
        trained.config,
        device,
        precision,
    )


def choose_device(accelerator: str) -> torch.device:
    """The device for `auto`, `cpu` or `gpu`.

    Raises:
        UserError: for another word, or `gpu` where there is none.
    """
    if accelerator not in ACCELERATORS:
        raise UserError(f"accelerator={accelerator}: choose one of {', '.join(ACCELERATORS)}")
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError("accelerator=gpu: torch sees no GPU here; take accelerator=cpu, or auto")
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if on_gpu else "cpu")
