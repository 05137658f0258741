"""The single objectives: what each sums over the pixels, and how its value follows from the sums."""

from dataclasses import dataclass

import torch
from torch import Tensor

from seg4k.losses.pixels import Pixels

Sums = dict[str, Tensor]

_TINY = 1e-7  # keeps 0 / 0 a zero; far below any sum that holds a pixel


@dataclass(frozen=True)
class CrossEntropy:
    """Mean of w[y] * -log p[y] over valid pixels, divided by the sum of w[y], as in `F.cross_entropy`.

    With label smoothing e: (1 - e) of that plus e / K times the sum over classes c of w[c] * -log p[c]
    (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567).
    """

    label_smoothing: float = 0.0

    def sums(self, pixels: Pixels, class_weights: Tensor) -> Sums:
        """Give the numerator: {"ce": scalar}."""
        own = -(class_weights[pixels.target] * pixels.log_probability).sum()
        if not self.label_smoothing:
            return {"ce": own}
        assert pixels.class_log_probability is not None
        every = -(class_weights * pixels.class_log_probability).sum() / len(class_weights)
        return {"ce": (1 - self.label_smoothing) * own + self.label_smoothing * every}

    def total(self, sums: Sums, class_weights: Tensor) -> Tensor:
        """Give the sum over the pixels, still to be divided by their (weighted) number."""
        return sums["ce"]


@dataclass(frozen=True)
class Focal:
    """Mean of w[y] * (1 - p[y])^gamma * -log p[y]; cross-entropy for gamma 0.

    Lin et al. 2017, https://arxiv.org/abs/1708.02002, on the softmax where there are several channels; their
    alpha is what `class_weights` are here. Divided, as cross-entropy is, by the sum of w[y].
    """

    gamma: float = 2.0

    def sums(self, pixels: Pixels, class_weights: Tensor) -> Sums:
        """Give the numerator: {"focal": scalar}."""
        log_p = pixels.log_probability
        # A gamma below 1 has an infinite slope at 0: the clamp cuts the gradient there, not the value.
        miss = (-torch.expm1(log_p)).clamp_min(torch.finfo(log_p.dtype).tiny)
        return {"focal": -(class_weights[pixels.target] * miss.pow(self.gamma) * log_p).sum()}

    def total(self, sums: Sums, class_weights: Tensor) -> Tensor:
        """Give the sum over the pixels, still to be divided by their (weighted) number."""
        return sums["focal"]


@dataclass(frozen=True)
class Region:
    """1 - (I + s) / (I + alpha (P - I) + beta (N - I) + s), in the mean over the classes of the target.

    I, P, N are sums over the valid pixels of the whole batch: of the probability of a class where it is
    true, of its probability everywhere, and of the pixels where it is true. alpha = beta = 1/2 is Dice, 1 is
    Jaccard (soft IoU), others are Tversky (Salehi et al. 2017, https://arxiv.org/abs/1706.05721).

    A class that no valid pixel has is left out of the mean; smp counts it as a loss of 0, so that
    rare classes weaken the others. `class_weights` weigh the mean. A binary task takes the foreground alone.
    """

    alpha: float
    beta: float
    smooth: float = 0.0

    def sums(self, pixels: Pixels, class_weights: Tensor) -> Sums:
        """Give {"intersection": (K,), "probability": (K,)}; the counts are common to all objectives."""
        assert pixels.class_probability is not None
        hits = pixels.sums_by_class(pixels.log_probability.exp(), len(class_weights))
        return {"intersection": hits, "probability": pixels.class_probability}

    def value(self, sums: Sums, class_weights: Tensor, classes: slice) -> Tensor:
        """Give the loss, a scalar; 0 where there is no valid pixel."""
        hits, probability, count = (sums[key][classes] for key in ("intersection", "probability", "count"))
        weights = class_weights[classes] * (count > 0)
        count = count.to(hits.dtype)
        whole = hits + self.alpha * (probability - hits) + self.beta * (count - hits) + self.smooth
        index = (hits + self.smooth) / whole.clamp_min(_TINY)
        total = weights.sum()
        return (weights * (1 - index)).sum() / torch.where(total > 0, total, 1.0)


Term = CrossEntropy | Focal | Region
