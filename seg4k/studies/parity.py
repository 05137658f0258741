"""Has the mode changed the result? Paired differences of validation metrics, seed by seed, and a verdict.

The verdicts, tried in this order (d are the differences of val_miou, mode minus baseline, over the seeds that
both completed; m is the margin):

- `exact`: val_miou, every class of val_iou and val_loss are equal to the last bit in every pair.
- `outside_margin`: the 95% confidence interval of mean(d) lies wholly beyond +m or wholly beyond -m; or the
  runs have no noise of their own (32-bit on a CPU, where equality to the bit is promised), so that every
  difference is the mode's doing, and val_miou, a class of val_iou or val_loss differs by more than m in any
  pair.
- `within_margin`: the 95% confidence interval of mean(d) lies inside [-m, +m]. A difference that is merely
  not significant is not parity: a wide interval around zero does not pass.
- `inconclusive`: none of these; with fewer than two pairs there is no interval at all.

The interval is Student's, mean(d) +- t(0.975, n - 1) * sd(d) / sqrt(n). With zero spread it is a point.
Asking that it lie inside the margin is the equivalence test of Schuirmann (1987), here at 2.5% a side.
"""

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from seg4k.errors import UserError

CONFIDENCE = 0.95
DEFAULT_MARGIN = 1e-4
_MOST_SEEDS = 1_000_000

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Parity:
    """A verdict and what it rests on.

    Attributes:
        verdict: `exact`, `within_margin`, `outside_margin` or `inconclusive`.
        words: the same as a sentence.
        pairs: number of seeds compared.
        mean: mean difference of val_miou, mode minus baseline; None without pairs.
        largest: largest absolute difference of val_miou; None without pairs.
        interval: 95% confidence interval of the mean; None with fewer than two pairs.
        seeds_needed: how many seeds would probably decide, at the spread seen; None where that is decided
            already or cannot be told.
    """

    verdict: str
    words: str
    pairs: int
    mean: float | None = None
    largest: float | None = None
    interval: tuple[float, float] | None = None
    seeds_needed: int | None = None


def judge_parity(
    baseline: Mapping[Key, Mapping[str, Any]],
    candidate: Mapping[Key, Mapping[str, Any]],
    *,
    margin: float = DEFAULT_MARGIN,
    noise_free: bool = False,
) -> Parity:
    """Compare the metrics of a mode with those of the baseline (see the module's text for the verdicts).

    Args:
        baseline: seed (or any key that pairs runs) -> metrics of the run card (`val_miou`, `val_iou`,
            `val_loss`). Keys that only one side has, and pairs without a val_miou, are left out.
        candidate: the same for the mode to be judged.
        margin: largest difference of val_miou that counts as parity, fixed before the runs.
        noise_free: whether equal computations give equal bits here, so that any difference is the mode's.

    Raises:
        UserError: where the margin is negative or not a number.
    """
    check_margin(margin)
    shared = [key for key in baseline if key in candidate]
    pairs = [(baseline[key], candidate[key]) for key in shared if _has_miou(baseline[key], candidate[key])]
    if not pairs:
        missing = "has a val_miou" if shared else "was completed"
        return Parity("inconclusive", f"no seed {missing} under both modes: nothing to compare", 0)
    differences = [float(there["val_miou"]) - float(here["val_miou"]) for here, there in pairs]
    mean = statistics.fmean(differences)
    largest = max(abs(difference) for difference in differences)
    count = len(pairs)
    interval = confidence_interval(differences) if count > 1 else None
    seeds = f"{count} seed{'s' if count > 1 else ''}"
    if all(same_metrics(here, there) for here, there in pairs):
        words = f"equal to the last bit on {seeds} (mIoU, every class, loss)"
        return Parity("exact", words, count, mean, largest, interval)
    drift = max(_largest_difference(here, there) for here, there in pairs)
    if noise_free and drift > margin:
        words = (
            f"drifts: these runs have no noise of their own, yet a metric differs by {drift:.2g} "
            f"(margin {margin:.2g}; mIoU by {largest:.2g} at most) on {seeds}"
        )
        return Parity("outside_margin", words, count, mean, largest, interval)
    if interval is None:
        words = f"one seed differs by {mean:+.2g} and gives no spread: it takes at least 2"
        return Parity("inconclusive", words, count, mean, largest, None, 2)
    low, high = interval
    spoken = f"mean difference {mean:+.2g}, 95% interval {low:+.2g} to {high:+.2g}, {seeds}"
    if low > margin or high < -margin:
        return Parity("outside_margin", f"{spoken}: beyond ±{margin:.2g}", count, mean, largest, interval)
    if -margin <= low and high <= margin:
        words = f"{spoken}: inside ±{margin:.2g}"
        if noise_free:
            words += "; but these runs have no noise of their own, so something differs"
        return Parity("within_margin", words, count, mean, largest, interval)
    needed = seeds_needed(mean, statistics.stdev(differences), margin)
    needed = None if needed is None else max(needed, count + 1)
    take = f"about {needed:,}" if needed is not None else f"more than {_MOST_SEEDS:,}"
    words = f"{spoken}: too wide for ±{margin:.2g}; at this spread it would take {take} seeds"
    return Parity("inconclusive", words, count, mean, largest, interval, needed)


def check_margin(margin: float) -> None:
    """Refuse a margin that is negative or not finite.

    Raises:
        UserError: then.
    """
    if not (math.isfinite(margin) and margin >= 0):
        raise UserError(f"the parity margin is {margin}, and has to be a number >= 0, such as 1e-4")


def same_metrics(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether val_miou, every class of val_iou and val_loss are equal to the last bit."""
    classes, others = first.get("val_iou") or {}, second.get("val_iou") or {}
    return (
        _same(first.get("val_miou"), second.get("val_miou"))
        and _same(first.get("val_loss"), second.get("val_loss"))
        and classes.keys() == others.keys()
        and all(_same(value, others[name]) for name, value in classes.items())
    )


def confidence_interval(differences: Sequence[float]) -> tuple[float, float]:
    """95% confidence interval (Student's t) of the mean of at least two numbers."""
    count = len(differences)
    assert count >= 2, "an interval needs two numbers"
    mean = statistics.fmean(differences)
    half = (
        student_t_quantile(0.5 + CONFIDENCE / 2, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    )
    return mean - half, mean + half


def seeds_needed(mean: float, deviation: float, margin: float) -> int | None:
    """The fewest seeds whose interval, at this mean and standard deviation, would settle the question.

    None where a million would not do (the mean lies on the margin, or nearly).
    """
    gap = abs(abs(mean) - margin)

    def decides(count: int) -> bool:
        return student_t_quantile(0.5 + CONFIDENCE / 2, count - 1) * deviation / math.sqrt(count) <= gap

    if not decides(_MOST_SEEDS):
        return None
    low, high = 2, _MOST_SEEDS  # the width falls with every seed, so halving finds the first that decides
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle + 1, high)
    return low


def student_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, to about ten digits, for 0.5 <= probability < 1.

    Few degrees of freedom: bisection on the closed form of the distribution function for whole degrees
    (Abramowitz and Stegun 26.7.3 and 26.7.4). Many: the expansion about the normal quantile (26.7.5).
    """
    assert 0.5 <= probability < 1, "only the upper half is used"
    assert degrees >= 1, "no spread without a degree of freedom"
    if degrees > 200:
        x = statistics.NormalDist().inv_cdf(probability)
        terms = (
            (x**3 + x) / 4,
            (5 * x**5 + 16 * x**3 + 3 * x) / 96,
            (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
            (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
        )
        return float(x + sum(term / degrees**power for power, term in enumerate(terms, start=1)))
    low, high = 0.0, 0.5 * math.pi  # the angle whose tangent is t / sqrt(degrees)
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _central_mass(middle, degrees) < 2 * probability - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan(0.5 * (low + high))


def _central_mass(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) * tan(angle)) for Student's T."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for step in range(degrees // 2):
        total += term
        ratio = (2 * step + 2) / (2 * step + 3) if odd else (2 * step + 1) / (2 * step + 2)
        term *= ratio * cosine * cosine
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def _same(first: object, second: object) -> bool:
    blank = (first is None or first != first, second is None or second != second)  # None and NaN: no value
    return first == second if not any(blank) else all(blank)


def _has_miou(*metrics: Mapping[str, Any]) -> bool:
    values = [each.get("val_miou") for each in metrics]
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)


def _largest_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Largest difference among val_miou, the classes and val_loss; infinite where only one has a value."""

    def values(metrics: Mapping[str, Any]) -> dict[str, Any]:
        classes = metrics.get("val_iou") or {}
        return {
            "": metrics["val_miou"],
            "loss": metrics.get("val_loss"),
            **{f".{k}": v for k, v in classes.items()},
        }

    here, there = values(first), values(second)
    largest = 0.0
    for name in here.keys() | there.keys():
        one, other = here.get(name), there.get(name)
        if _same(one, other):
            continue
        both = isinstance(one, int | float) and isinstance(other, int | float)
        difference = abs(float(one) - float(other)) if both else math.inf  # type: ignore[arg-type]
        largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest
