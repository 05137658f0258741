"""The LightningModule: one training step, one validation step, the optimizer. Nothing else."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from seg4k.data.classes import ClassTable
from seg4k.losses.loss import SegmentationLoss
from seg4k.losses.strips import evaluate_strips, strip_loss
from seg4k.metrics import ConfusionMatrix
from seg4k.models.vit_unet import ViTUNet
from seg4k.training.optimizers import build_optimizer, schedule

Batch = Mapping[str, Any]


class ValidationCounts:
    """What one validation adds up. No module, so that averaging the weights does not average the counts."""

    def __init__(self, classes: ClassTable, device: torch.device) -> None:
        self.confusion = ConfusionMatrix(len(classes), ignore_index=classes.ignore_index).to(device)
        self.sums: dict[str, Tensor] = {}
        self.samples = 0

    def add(self, labels: Tensor, mask: Tensor, sums: Mapping[str, Tensor]) -> None:
        """Count one batch: predicted labels and mask (B, H, W), and the loss's sums over its pixels."""
        self.confusion.update(labels, mask)
        wide = {key: value.double() if value.is_floating_point() else value for key, value in sums.items()}
        self.sums = {key: self.sums[key] + value if self.sums else value for key, value in wide.items()}
        self.samples += len(mask)

    def all_reduce(self) -> None:
        """Add up over all processes."""
        self.confusion.all_reduce()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for key in sorted(self.sums):
                torch.distributed.all_reduce(self.sums[key])


class SegmentationModule(LightningModule):
    """Trains a `ViTUNet`.

    Args:
        model: the segmenter.
        loss: a mean over valid pixels, from sums over them.
        classes: names, colours and the label to ignore.
        optimizer: the `optimizer` group of the configuration.
        strips: how many strips of rows head and loss are taken in, and the bytes `auto` may take for one.
        schedule: the `schedule` group of the configuration.
        description: what a checkpoint says of itself beside its weights; plain values only.
    """

    def __init__(
        self,
        model: ViTUNet,
        loss: SegmentationLoss,
        classes: ClassTable,
        *,
        strips: tuple[int | str, int],
        optimizer: Mapping[str, Any],
        schedule: Mapping[str, Any],
        description: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.classes = classes
        self.strips, self.strip_bytes = strips
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
        loss = strip_loss(
            self.model.forward_features(batch["image"]),
            self.model.head,
            batch["mask"],
            self.loss,
            self.strips,
            upsample=self.model.head_stride,
            strip_bytes=self.strip_bytes,
        )
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch["image"]))
        return loss

    def on_validation_epoch_start(self) -> None:
        """Start counting anew."""
        self.counts = ValidationCounts(self.classes, self.device)

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Count one batch, strip by strip; how the set is cut into batches does not matter."""
        mask = batch["mask"]
        labels, sums = evaluate_strips(
            self.model.forward_features(batch["image"]),
            self.model.head,
            mask,
            self.loss,
            self.strips,
            upsample=self.model.head_stride,
            strip_bytes=self.strip_bytes,
        )
        self.counts.add(labels, mask, sums)

    def on_validation_epoch_end(self) -> None:
        """Log IoU per class, mIoU and loss over the whole validation set."""
        self.counts.all_reduce()
        confusion = self.counts.confusion
        values = {"val_miou": confusion.miou(), "val_loss": self.loss.finish(self.counts.sums)}
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
