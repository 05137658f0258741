"""The loss of a training step: a weighted sum of objectives, each a function of sums over the pixels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seg4k.losses.pixels import read_pixels, split_target
from seg4k.losses.terms import CrossEntropy, Region, Sums, Term

FOREGROUND = slice(1, None)  # of a binary task: Dice and its kin look at label 1 only
EVERY_CLASS = slice(None)


@dataclass(frozen=True)
class WeightedTerm:
    """One objective and its factor in the sum."""

    weight: float
    term: Term


class SegmentationLoss(nn.Module):
    """A weighted sum of objectives over the valid pixels of a batch.

    `loss(logits, target)` is `loss.finish(loss.statistics(logits, target))`. The statistics of parts of the
    pixels (strips of an image, images of a batch, batches of a validation set, processes) add up to those of
    the whole, key by key, so that the loss of the whole can be had from its parts, exactly.

    Everything is computed in fp32 (fp64 for fp64 logits), whatever autocast is in force. Pixels of
    `ignore_index` have no part in any sum. Without a single valid pixel the loss and its gradients are 0.
    Any other label outside the classes is a fault of the data that the gather of its logit raises on
    (RuntimeError on the CPU).

    Args:
        terms: the objectives and their factors.
        num_classes: number of logit channels C. 1 is a binary task with labels 0 and 1, p = sigmoid(logit);
            2 or more take the softmax over the channels, and labels are 0 to C - 1.
        ignore_index: label of the pixels to leave out.
        class_weights: one weight per label (two for a binary task: background, foreground), else all 1.
    """

    class_weights: Tensor

    def __init__(
        self,
        terms: Sequence[WeightedTerm],
        num_classes: int,
        ignore_index: int = 255,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.terms = tuple(terms)
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self._classes = FOREGROUND if num_classes == 1 else EVERY_CLASS
        self._probabilities = any(isinstance(item.term, Region) for item in terms)
        self._log_probabilities = any(
            isinstance(item.term, CrossEntropy) and item.term.label_smoothing > 0 for item in terms
        )
        labels = max(2, num_classes)
        if class_weights is not None and len(class_weights) != labels:
            raise ValueError(f"{len(class_weights)} class weights for {labels} labels")
        weights = torch.ones(labels) if class_weights is None else torch.tensor(class_weights).float()
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, logits: Tensor, target: Tensor, normalizer: Tensor | float | None = None) -> Tensor:
        """Return the loss, a scalar, of logits (B, C, H, W) against labels (B, H, W); see `finish`."""
        return self.finish(self.statistics(logits, target), normalizer)

    def statistics(self, logits: Tensor, target: Tensor) -> Sums:
        """Return the sums over pixels that every term needs.

        Args:
            logits: (B, C, h, w), any floating type; taken to fp32 unless fp64.
            target: (B, h, w), any integer type.

        Returns:
            Named tensors, additive over any partition of the pixels: `count` (labels,) in int64 holds the
            valid pixels of each label; the others, scalars or (labels,), are in fp32 (fp64 for fp64 logits).
        """
        if logits.shape[1] != self.num_classes or logits.shape[2:] != target.shape[1:]:
            raise ValueError(
                f"logits {tuple(logits.shape)} do not fit target {tuple(target.shape)} "
                f"and {self.num_classes} channels"
            )
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits if logits.dtype == torch.float64 else logits.float()
            pixels = read_pixels(
                logits,
                target,
                self.ignore_index,
                probabilities=self._probabilities,
                log_probabilities=self._log_probabilities,
            )
            weights = self.class_weights.to(logits.dtype)
            sums: Sums = {}
            for item in self.terms:
                if not (
                    isinstance(item.term, Region) and "intersection" in sums
                ):  # common to all region losses
                    sums |= item.term.sums(pixels, weights)
            sums["count"] = pixels.counts(len(weights))  # last: a recomputation stops before it
        return sums

    def finish(self, sums: Sums, normalizer: Tensor | float | None = None) -> Tensor:
        """Return the loss, a scalar, from the sums of all its pixels.

        Args:
            sums: what `statistics` gave, or the sum of several of them by `add_sums`.
            normalizer: what the sums are divided by, where that is not this batch's own `pixels(target)`,
                e.g. its sum over the micro-batches of an accumulated step and over the processes. The result
                is then the loss of these pixels times their share of all. For cross-entropy and focal the
                results add up to the loss of all pixels at once, exactly. Region losses are not linear in the
                pixels: theirs add up to the mean of the losses of each part, weighted by its pixels.
        """
        count = sums["count"]
        device, dtype = count.device, next(value.dtype for key, value in sums.items() if key != "count")
        with torch.autocast(device.type, enabled=False):
            weights = self.class_weights.to(dtype)
            own = (count.to(dtype) * weights).sum()
            whole = own if normalizer is None else torch.as_tensor(normalizer, dtype=dtype, device=device)
            whole = torch.where(whole > 0, whole, torch.ones_like(whole))
            loss = torch.zeros((), dtype=dtype, device=device)
            for item in self.terms:
                if isinstance(item.term, Region):
                    value = item.term.value(sums, weights, self._classes)
                    if normalizer is not None:
                        value = value * (own / whole)
                else:
                    value = item.term.total(sums, weights) / whole
                loss = loss + item.weight * value
        return loss

    @torch.no_grad()
    def pixels(self, target: Tensor) -> Tensor:
        """Return the number of valid pixels of target (B, H, W), each by its class weight: a fp32 scalar."""
        total = torch.zeros((), device=target.device)
        for image in target:
            classes, valid = split_target(image, self.ignore_index)
            total += (self.class_weights[classes] * valid).sum()
        return total


def add_sums(first: Sums | None, second: Sums) -> Sums:
    """Add the statistics of two parts of the pixels; None stands for no pixels."""
    return second if first is None else {key: first[key] + value for key, value in second.items()}
