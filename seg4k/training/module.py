"""The LightningModule: one training step, one validation step, the optimizer. Nothing else."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from seg4k.data.classes import ClassTable
from seg4k.errors import UserError
from seg4k.losses.loss import SegmentationLoss
from seg4k.losses.strips import evaluate_strips, strip_statistics
from seg4k.metrics import ConfusionMatrix
from seg4k.models.vit_unet import ViTUNet
from seg4k.training.eight_bit import from_plain, to_plain
from seg4k.training.global_batch import (
    GlobalBatch,
    average_running_statistics,
    finish_gradients,
    running_statistics,
)
from seg4k.training.optimizers import (
    apply_group_settings,
    build_optimizer,
    group_settings,
    schedule,
    state_in_model_order,
)
from seg4k.training.randomness import seed_micro_batch

logger = logging.getLogger(__name__)

PADDING_NAME = "padding"  # of the samples that only keep processes in step
ON_NAN = ("stop", "skip")

Batch = Mapping[str, Any]


class ValidationCounts:
    """What one validation adds up. No module, so that averaging the weights does not average the counts."""

    def __init__(self, classes: ClassTable, device: torch.device) -> None:
        self.confusion = ConfusionMatrix(len(classes), ignore_index=classes.ignore_index).to(device)
        self.sums: dict[str, Tensor] = {}
        self.samples = 0

    def add(self, labels: Tensor, mask: Tensor, sums: Mapping[str, Tensor], samples: int) -> None:
        """Count a batch: predicted labels and mask (B, H, W), the loss's sums of its pixels, its samples."""
        self.confusion.update(labels, mask)
        wide = {key: value.double() if value.is_floating_point() else value for key, value in sums.items()}
        self.sums = {key: self.sums[key] + value if self.sums else value for key, value in wide.items()}
        self.samples += samples

    def all_reduce(self) -> None:
        """Add up over all processes."""
        self.confusion.all_reduce()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for key in sorted(self.sums):
                torch.distributed.all_reduce(self.sums[key])
            samples = torch.tensor(self.samples, device=self.confusion.matrix.device)
            torch.distributed.all_reduce(samples)
            self.samples = int(samples)


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
        seed: of the run, for what is random inside the model.
        gradient_clip: the largest norm of the gradient of the global batch; 0 for none.
        on_nan: what a step whose loss or gradient is not finite does: `stop` the run, or `skip` itself.
        log_every_steps: optimizer steps between two lines of the loggers.

    Attributes:
        stop_requested: asked at each optimizer step; where it is true on any process, `stop_agreed` becomes
            true on all of them.
    """

    stop_requested: Callable[[], bool] = staticmethod(lambda: False)
    _scheduler: torch.optim.lr_scheduler.LambdaLR
    _settings: list[dict[str, Any]]  # of the optimizer's groups, before a state is loaded

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
        seed: int = 0,
        gradient_clip: float = 0.0,
        on_nan: str = "stop",
        log_every_steps: int = 1,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.classes = classes
        self.strips, self.strip_bytes = strips
        self.optimizer_config = optimizer
        self.schedule_config = schedule
        self.description = description
        self.seed = seed
        self.gradient_clip = gradient_clip
        self.on_nan = on_nan
        self.log_every_steps = log_every_steps
        self.stop_agreed = False
        self.skipped_steps = 0
        self.global_batch = GlobalBatch()
        self._statistics: list[Tensor] = []  # of batch norms, before the step, in case it is skipped
        self.counts = ValidationCounts(classes, torch.device("cpu"))
        self.scores: dict[str, float] = {}  # of the last validation, over all processes
        self.validated_step: int | None = None  # the optimizer step that the last validation looked at

    def forward(self, image: Tensor) -> Tensor:
        """Logits (B, classes, H, W) of an image (B, C, H, W)."""
        return cast(Tensor, self.model(image))

    def on_train_batch_start(self, batch: Batch, batch_index: int) -> None:
        """Make what is random in this micro-batch follow from its place in the run."""
        part = self.global_batch.parts
        seed_micro_batch(self.seed, self.trainer.global_step, part, self.trainer.global_rank)
        if self.on_nan == "skip" and part == 0:
            self._statistics = [one.clone() for one in running_statistics(self.model)]

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """The loss of one micro-batch, over all of its pixels; see `global_batch`."""
        mask = batch["mask"]
        sums = strip_statistics(
            self.model.forward_features(batch["image"]),
            self.model.head,
            mask,
            self.loss,
            self.strips,
            upsample=self.model.head_stride,
            strip_bytes=self.strip_bytes,
        )
        loss = self.loss.finish(sums, normalizer=mask.numel())
        self.global_batch.add(loss, sums["count"], self.loss.class_weights, mask.numel())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients those of the global batch, clip them, and look whether they are numbers.

        Raises:
            UserError: the loss or the gradient is NaN or infinite, and `on_nan` is `stop`. The weights are
                those of the step before.
        """
        totals = self.global_batch.close(self.stop_requested())
        self.stop_agreed = totals.stop
        step = self.trainer.global_step + 1
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = finish_gradients(parameters, totals.factor, self.gradient_clip)
        # Gradients of fp16 overflow now and then: the scaler skips such a step and lowers its scale.
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if not math.isfinite(totals.loss) or not (scaled or math.isfinite(norm)):
            what = (
                f"the loss is {totals.loss}" if not math.isfinite(totals.loss) else f"the gradient is {norm}"
            )
            self._not_finite(what, step, parameters)
        average_running_statistics(self.model)
        self.log("train_loss", totals.loss, prog_bar=True, logger=False)
        if step % self.log_every_steps == 0:
            self._write({"train_loss": totals.loss}, step)

    def _not_finite(self, what: str, step: int, parameters: list[torch.nn.Parameter]) -> None:
        if self.on_nan == "stop":
            raise UserError(
                f"{what} in optimizer step {step}. Lower optimizer.lr, lengthen schedule.warmup_steps or set "
                "precision=fp32 (or bf16 in place of fp16), and go on from the last checkpoint with "
                "resume=auto; trainer.on_nan=skip leaves such steps out."
            )
        self.skipped_steps += 1
        for parameter in parameters:
            parameter.grad = None  # an optimizer leaves parameters without a gradient as they are
        for statistic, before in zip(running_statistics(self.model), self._statistics, strict=True):
            statistic.copy_(before)
        if self.trainer.is_global_zero:
            logger.warning("%s in optimizer step %d: skipped (%d so far)", what, step, self.skipped_steps)

    def _write(self, values: Mapping[str, float], step: int) -> None:
        """Write a line to every logger, under the number of optimizer steps done."""
        for writer in self.trainer.loggers:
            writer.log_metrics(dict(values), step=step)

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
        samples = sum(name != PADDING_NAME for name in batch["name"])
        self.counts.add(labels, mask, sums, samples)

    def on_validation_epoch_end(self) -> None:
        """Log IoU per class, mIoU and loss over the whole validation set."""
        self.counts.all_reduce()
        confusion = self.counts.confusion
        values = {"val_miou": confusion.miou(), "val_loss": self.loss.finish(self.counts.sums)}
        values |= {
            f"val_iou/{name}": value for name, value in zip(self.classes.names, confusion.iou(), strict=True)
        }
        for name, value in values.items():
            self.log(name, value.float(), prog_bar=name == "val_miou", logger=False, rank_zero_only=True)
        self.scores = {name: float(value) for name, value in values.items()}
        self.validated_step = self.trainer.global_step
        self._write(self.scores, self.validated_step)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer, and its schedule counted in optimizer steps."""
        optimizer = build_optimizer(self.optimizer_config, self.model.parameters_by_depth())
        factor = schedule(self.schedule_config, self.trainer.max_steps)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        self._settings = group_settings(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self._scheduler, "interval": "step"},
        }

    def on_train_start(self) -> None:
        """Go on with the settings of this run, not with those that the checkpoint's optimizer had."""
        apply_group_settings(self.trainer.optimizers[0], self._scheduler, self._settings)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the file needs to load with nothing else."""
        checkpoint["seg4k"] = dict(self.description)
        checkpoint["skipped_steps"] = self.skipped_steps
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = to_plain(self.numbered(checkpoint["optimizer_states"]))

    def numbered(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Optimizer states whose parameters are numbered in the order of the model."""
        optimizers = self.trainer.optimizers
        return [state_in_model_order(*pair, self) for pair in zip(states, optimizers, strict=True)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting."""
        self.skipped_steps = checkpoint["skipped_steps"]
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = from_plain(checkpoint["optimizer_states"])
