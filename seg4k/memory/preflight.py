"""Before a run: does it fit, and if not, what would; after an out-of-memory error: what led to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from seg4k.memory.auto import AutoPlanner, PlannedStep
from seg4k.memory.budget import Budget
from seg4k.memory.ledger import Reading
from seg4k.memory.planner import smallest_budget
from seg4k.memory.readable import gib

__all__ = ["LargestBatch", "cheapest_changes", "clearly_below", "does_not_fit", "largest_batch", "what_led"]

_CLEARLY = 0.95  # of the predicted peak of a step that did not fit


def does_not_fit(planner: AutoPlanner, budget: Budget, *, lower: Mapping[str, str] | None = None) -> str:
    """The message where no plan fits: the smallest budget that would do, and what lowers it further.

    Args:
        planner: of the step.
        budget: too few bytes.
        lower: settings that lower the need further, with what each does.
    """
    smallest = planner.smallest()
    peak, slowdown = smallest.trace.peak_bytes, smallest.seconds / planner.baseline.seconds
    text = (
        f"No plan fits in {gib(budget.bytes)}. {budget.bound} The smallest budget that does is {gib(peak)} "
        f"({peak} bytes), at {slowdown:.2f} times the time of a step that recomputes nothing."
    )
    if lower:
        text += " Lower it further with " + "; ".join(f"{key} ({what})" for key, what in lower.items()) + "."
    return text


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits, and its plan."""

    batch: int
    step: PlannedStep


def largest_batch(
    planner_for: Callable[[int], AutoPlanner], budget: int, limit: int = 1024
) -> LargestBatch | None:
    """The largest batch per device for which some plan fits, or None where not even one image does.

    The smallest peak grows nearly linearly with the batch, so two batches tell where to look; the answer
    itself is traced, and so is the next larger batch, which does not fit.

    Args:
        planner_for: from a batch to the planner of its step. Called about five times.
        budget: bytes that tensors may take.
        limit: not more than this.
    """
    found: dict[int, PlannedStep | None] = {}
    needs: dict[int, int] = {}

    def fits(batch: int) -> bool:
        if batch not in found:
            planner = planner_for(batch)
            needs[batch] = smallest_budget(planner.problem)
            found[batch] = planner.at(budget)
        return found[batch] is not None

    if not fits(1):
        return None
    low, high = 1, limit + 1  # the largest known to fit, the smallest known not to
    guess = 2
    while high - low > 1:
        guess = min(max(guess, low + 1), high - 1)
        if fits(guess):
            low = guess
        else:
            high = guess
        (first, second) = sorted(needs)[0], sorted(needs)[-1]
        slope = (needs[second] - needs[first]) / (second - first)
        estimate = first + int((budget - needs[first]) / slope) if slope > 0 else limit
        guess = estimate if low < estimate < high else low + 1 if estimate <= low else high - 1
    step = found[low]
    assert step is not None
    return LargestBatch(low, step)


def what_led(reading: Reading, static: Mapping[str, int]) -> str:
    """What took most when memory ran out: activations, a part of what is static, or fragmentation.

    Args:
        reading: of the ledger, at the error.
        static: bytes by `seg4k.memory.traced.STATIC`; what else there is of the peak is activations.
    """
    peak, reserved = reading.peak_bytes or 0, reading.reserved_bytes or reading.peak_bytes or 0
    parts = {
        "activations": peak - sum(static.values()),
        "optimizer state": static["optimizer"],
        "fragmentation": reserved - peak,
        "parameters": static["parameters"],
        "gradients": static["gradients"],
    }
    leader = max(parts, key=lambda name: parts[name])
    sizes = ", ".join(f"{name} {gib(max(0, size))}" for name, size in parts.items())
    return f"Memory ran out, led by {leader} ({sizes})."


def clearly_below(budget: int, now: PlannedStep) -> int:
    """The most that a change may need which is to help a step that ran out of memory.

    Where the step was predicted to fit and did not, that much is not there: only less will do.
    """
    return min(budget, int(_CLEARLY * now.trace.peak_bytes))


def cheapest_changes(
    alternatives: Mapping[str, PlannedStep], budget: int, now: PlannedStep, count: int = 3
) -> list[str]:
    """The alternatives that fit and need clearly less than now, cheapest first, with their predicted cost.

    Args:
        alternatives: from what to set, as on the command line, to the step that it makes.
        budget: bytes that tensors may take.
        now: the step as it is set, which ran out of memory.
        count: how many.
    """
    most = clearly_below(budget, now)
    fitting = [(key, step) for key, step in alternatives.items() if step.trace.peak_bytes <= most]
    fitting.sort(key=lambda item: item[1].seconds)
    return [
        f"{key}: {gib(step.trace.peak_bytes)}, {step.seconds / now.seconds - 1:+.1%} time a step"
        for key, step in fitting[:count]
    ]
