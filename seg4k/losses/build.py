"""From the `loss` group of the configuration to a loss, with every mistake in it named."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from seg4k.errors import UserError
from seg4k.losses.loss import SegmentationLoss, WeightedTerm
from seg4k.losses.strips import DEFAULT_STRIP_BYTES
from seg4k.losses.terms import CrossEntropy, Focal, Region, Term

# The settings of each objective, with their defaults.
TERMS: dict[str, dict[str, float]] = {
    "ce": {"label_smoothing": 0.0},
    "focal": {"gamma": 2.0},
    "dice": {"smooth": 0.0},
    "jaccard": {"smooth": 0.0},
    "tversky": {"alpha": 0.3, "beta": 0.7, "smooth": 0.0},
}
_COMMON = ("terms", "class_weights", "strips", "strip_bytes")
_RANGES = {"label_smoothing": (0.0, 1.0), "gamma": (0.0, 100.0), "smooth": (0.0, math.inf)}


def build_loss(config: Mapping[str, Any], num_classes: int, ignore_index: int = 255) -> SegmentationLoss:
    """Build the loss that a configuration describes.

    Args:
        config: `terms`, a mapping from objective (ce, focal, dice, jaccard, tversky) to its factor in the
            sum; `class_weights`, a list or None; the settings of the objectives named (see `TERMS`), and no
            others. `strips` and `strip_bytes` are allowed, checked, and left to `strip_loss`.
        num_classes: channels of the logits; 1 is a binary task, see `SegmentationLoss`.
        ignore_index: label of pixels to leave out.

    Raises:
        UserError: names the key at fault and what it may be.
    """
    terms = config.get("terms")
    if not isinstance(terms, Mapping) or not terms:
        raise UserError(
            f"loss.terms must name at least one of {', '.join(TERMS)} with its factor, got {terms!r}"
        )
    for name in terms:
        if name not in TERMS:
            raise UserError(f"loss.terms has the unknown objective {name!r}; choose from {', '.join(TERMS)}")
    settings = {key for name in terms for key in TERMS[name]}
    for key in config:
        if key not in _COMMON and key not in settings:
            raise UserError(
                f"loss.{key} has no effect with the terms {', '.join(terms)}: "
                f"remove it; possible are {', '.join([*_COMMON, *sorted(settings)])}"
            )
    strip_options(config)
    weighted = []
    for name in terms:
        factor = _number(terms[name], f"loss.terms.{name}", 0.0, math.inf)
        if factor:
            weighted.append(WeightedTerm(factor, _term(name, config)))
    if not weighted:
        raise UserError("loss.terms are all 0: give at least one objective a factor above 0")
    weights = _class_weights(config.get("class_weights"), max(2, num_classes))
    return SegmentationLoss(weighted, num_classes, ignore_index, weights)


def strip_options(config: Mapping[str, Any]) -> tuple[int | str, int]:
    """Return (`strips`, `strip_bytes`) of a loss configuration: "auto" or a number, and the bytes of "auto".

    Raises:
        UserError: where either is not what it may be.
    """
    strips, limit = config.get("strips", "auto"), config.get("strip_bytes", DEFAULT_STRIP_BYTES)
    if strips != "auto" and (not isinstance(strips, int) or isinstance(strips, bool) or strips < 1):
        raise UserError(f"loss.strips must be auto or a whole number from 1 on, got {strips!r}")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise UserError(f"loss.strip_bytes must be a whole number of bytes above 0, got {limit!r}")
    return strips, limit


def _term(name: str, config: Mapping[str, Any]) -> Term:
    values = {}
    for key, default in TERMS[name].items():
        low, high = _RANGES.get(key, (0.0, math.inf))
        values[key] = _number(config.get(key, default), f"loss.{key}", low, high)
    if name == "ce":
        return CrossEntropy(**values)
    if name == "focal":
        return Focal(**values)
    if name == "tversky":
        if values["alpha"] + values["beta"] == 0:
            raise UserError("loss.alpha and loss.beta are both 0, which counts no mistake: raise one of them")
        return Region(**values)
    if name == "dice":
        return Region(alpha=0.5, beta=0.5, smooth=values["smooth"])
    return Region(alpha=1.0, beta=1.0, smooth=values["smooth"])


def _number(value: object, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        limit = f"from {low:g} to {high:g}" if math.isfinite(high) else f"from {low:g} on"
        raise UserError(f"{name} must be a number {limit}, got {value!r}")
    if math.isinf(value):
        raise UserError(f"{name} must be finite")
    return float(value)


def _class_weights(value: object, labels: int) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != labels:
        raise UserError(
            f"loss.class_weights must be null or a list of {labels} numbers, one a class, got {value!r}"
        )
    weights = [_number(item, "each of loss.class_weights", 0.0, math.inf) for item in value]
    if not any(weights):
        raise UserError("loss.class_weights are all 0: give at least one class a weight")
    return weights
