"""One streaming confusion matrix, from which every score is read."""

import torch
from torch import Tensor, nn

from seg4k.errors import UserError

# Pixels counted at once: on the CPU few enough to stay in the cache, elsewhere enough to hide the launches.
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 23


class ConfusionMatrix(nn.Module):
    """Counts of pixels by class, exact in int64, gathered over any number of batches and processes.

    The scores depend on the set of pixels alone, not on how they were cut into batches, crops or processes.
    At most a few million pixels are looked at in one go, so that no temporary grows with the image.

    Attributes:
        matrix: int64 (classes, classes); entry [t, p] counts pixels of true class t predicted as p. A buffer
            that moves with the module but is no part of its `state_dict`.
    """

    matrix: Tensor

    def __init__(self, num_classes: int, ignore_index: int | None = 255) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"a confusion matrix needs at least 2 classes, got {num_classes}")
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self._reduced = False
        self.register_buffer(
            "matrix", torch.zeros(num_classes, num_classes, dtype=torch.int64), persistent=False
        )

    def reset(self) -> None:
        """Forget every pixel."""
        self.matrix.zero_()
        self._reduced = False

    @torch.no_grad()
    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Count the pixels of one batch, or of one strip of it.

        Args:
            prediction: labels (B, H, W), any integer type, each in [0, classes).
            target: labels (B, H, W), any integer type, each in [0, classes) or `ignore_index`.

        Raises:
            UserError: where a target label is neither a class nor `ignore_index`. Nothing is counted then.
            ValueError: where the shapes differ or a predicted label is not a class.
        """
        if prediction.shape != target.shape:
            raise ValueError(f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)} differ")
        self._assert_local()
        classes = self.num_classes
        bins = classes * (classes + 1)  # the last row takes what is ignored
        chunk = max(bins, _CPU_CHUNK if target.device.type == "cpu" else _DEVICE_CHUNK)
        counts = torch.zeros(bins, dtype=torch.int64, device=target.device)
        prediction, target = prediction.flatten(), target.flatten()
        for start in range(0, target.numel(), chunk):
            rows = target[start : start + chunk].long()
            columns = prediction[start : start + chunk].long()
            rows = self._checked(rows, columns)
            counts += torch.bincount(rows * classes + columns, minlength=bins)
        self.matrix += counts.view(classes + 1, classes)[:classes].to(self.matrix.device)

    def _checked(self, target: Tensor, prediction: Tensor) -> Tensor:
        """Return `target` with ignored pixels set to `classes`, once all labels are known to be in range."""
        classes = self.num_classes
        low, high = (int(value) for value in prediction.aminmax())
        if low < 0 or high >= classes:
            raise ValueError(f"predicted labels lie in [{low}, {high}], not in [0, {classes - 1}]")
        wrong = (target < 0) | (target >= classes)
        if self.ignore_index is not None:
            ignored = target == self.ignore_index
            wrong &= ~ignored
        if wrong.any():
            label = int(target[wrong][0])
            besides = "" if self.ignore_index is None else f", and {self.ignore_index} marks pixels to ignore"
            raise UserError(
                f"a mask holds label {label}, but the labels are 0 to {classes - 1}{besides}: "
                "mend the mask, list the class, or set ignore_index"
            )
        return target if self.ignore_index is None else torch.where(ignored, classes, target)

    def _assert_local(self) -> None:
        if self._reduced:
            raise RuntimeError("this matrix already holds the sum over the processes; reset() it first")

    def all_reduce(self) -> None:
        """Replace the matrix by its sum over all processes, where there are several.

        Called once, after the last `update`; until `reset`, a second call or an update would count twice and
        raises RuntimeError.
        """
        self._assert_local()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.matrix)
        self._reduced = True

    def iou(self) -> Tensor:
        """Intersection over union per class: float64 (classes,), NaN where target and prediction lack it."""
        matrix = self.matrix.double()
        hits = matrix.diagonal()
        union = matrix.sum(0) + matrix.sum(1) - hits
        return hits / union  # 0 / 0 is the NaN of an absent class

    def miou(self) -> Tensor:
        """Mean IoU over the classes that occur: float64 scalar, NaN before the first pixel."""
        return self.iou().nanmean()

    def accuracy(self) -> Tensor:
        """Share of pixels that are right: float64 scalar, NaN before the first pixel."""
        return self.matrix.diagonal().sum().double() / self.matrix.sum().double()
