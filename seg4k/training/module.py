"""The LightningModule: one training step, one validation step, the optimizer. Nothing else."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from seg4k.data.classes import ClassTable
from seg4k.metrics import ConfusionMatrix
from seg4k.models.vit_unet import ViTUNet
from seg4k.training.optimizers import build_optimizer, schedule

Batch = Mapping[str, Any]


class ValidationCounts:
    """What one validation adds up. No module, so that averaging the weights does not average the counts."""

    def __init__(self, classes: ClassTable, device: torch.device) -> None:
        self.confusion = ConfusionMatrix(len(classes), ignore_index=classes.ignore_index).to(device)
        self.loss_and_pixels = torch.zeros(2, dtype=torch.float64, device=device)
        self.samples = 0


class SegmentationModule(LightningModule):
    """Trains a `ViTUNet`.

    Args:
        model: the segmenter.
        loss: (logits (B, C, H, W), mask (B, H, W)) to a scalar, a mean over valid pixels.
        classes: names, colours and the label to ignore.
        optimizer: the `optimizer` group of the configuration.
        schedule: the `schedule` group of the configuration.
        description: what a checkpoint says of itself beside its weights; plain values only.
    """

    def __init__(
        self,
        model: ViTUNet,
        loss: nn.Module,
        classes: ClassTable,
        *,
        optimizer: Mapping[str, Any],
        schedule: Mapping[str, Any],
        description: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.classes = classes
        self.optimizer_config = optimizer
        self.schedule_config = schedule
        self.description = description
        self.counts = ValidationCounts(classes, torch.device("cpu"))
        self.validated_step: int | None = None  # the optimizer step that the last validation looked at

    def forward(self, image: Tensor) -> Tensor:
        """Logits (B, classes, H, W) of an image (B, C, H, W)."""
        return cast(Tensor, self.model(image))

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of one batch."""
        loss = cast(Tensor, self.loss(self(batch["image"]), batch["mask"]))
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["image"]))
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start counting anew."""
        self.counts = ValidationCounts(self.classes, self.device)

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Count one batch; its loss weighs by valid pixels, so that the batch size does not matter."""
        logits, mask = self(batch["image"]), batch["mask"]
        valid = (mask != self.classes.ignore_index).sum()
        self.counts.loss_and_pixels += torch.stack([self.loss(logits, mask) * valid, valid]).double()
        self.counts.confusion.update(logits.argmax(dim=1), mask)
        self.counts.samples += len(mask)

    def on_validation_epoch_end(self) -> None:
        """Log IoU per class, mIoU and loss over the whole validation set."""
        confusion, sums = self.counts.confusion, self.counts.loss_and_pixels
        confusion.all_reduce()
        if self.trainer.world_size > 1:
            sums = cast(Tensor, self.trainer.strategy.reduce(sums, reduce_op="sum"))
        values = {"val_miou": confusion.miou(), "val_loss": sums[0] / sums[1]}
        values |= {
            f"val_iou/{name}": value for name, value in zip(self.classes.names, confusion.iou(), strict=True)
        }
        for name, value in values.items():
            self.log(name, value.float(), prog_bar=name == "val_miou", rank_zero_only=True)
        self.validated_step = self.trainer.global_step

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, and its schedule counted in optimizer steps."""
        optimizer = build_optimizer(self.optimizer_config, self.model.parameters_by_depth())
        factor = schedule(self.schedule_config, self.trainer.max_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
                "interval": "step",
            },
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the file needs to load with nothing else."""
        checkpoint["seg4k"] = dict(self.description)
