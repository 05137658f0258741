"""Step times of several arms measured against each other in one process, alternating."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from seg4k.errors import UserError
from seg4k.memory.shortage import is_out_of_memory


def interleaved_timing(
    arms: Mapping[str, Callable[[], None]],
    *,
    warmup: int,
    repeats: int,
    baseline: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Time every arm once a round, for `repeats` rounds, the order of the arms rotating from round to round.

    What the machine does besides slows neighbours alike, so the ratio of two arms within a round holds where
    their absolute times do not. On CUDA the device is synchronised before and after each call. An arm that
    runs out of device memory is dropped with that status, and the others go on.

    Args:
        arms: name -> one whole step (the same batch for all).
        warmup: rounds that are run and not counted.
        repeats: rounds that count.
        baseline: the arm that ratios are taken to; the first one if None.
        clock: seconds, monotonic.

    Returns:
        `{"baseline", "warmup", "repeats", "arms": {name: {"status", "median_seconds", "iqr_seconds": [q1,
        q3], "ratio", "ratio_iqr": [q1, q3], "seconds": [...], "ratios": [...]}}}`. `ratio` is the median over
        rounds of the arm's time by the baseline's in the same round, above 1 where the arm is slower. The
        spread is the interquartile range. Values that were not measured are None or empty.

    Raises:
        UserError: where there is no arm, `warmup` is below 0, `repeats` below 1, or the baseline is no arm.
    """
    if not arms:
        raise UserError("nothing to time: name at least one arm")
    if warmup < 0 or repeats < 1:
        raise UserError(f"warmup={warmup} and repeats={repeats}: the first has to be >= 0, the second >= 1")
    baseline = next(iter(arms)) if baseline is None else baseline
    if baseline not in arms:
        raise UserError(f"the baseline {baseline!r} is not one of the arms: {', '.join(arms)}")
    import torch

    seconds: dict[str, dict[int, float]] = {name: {} for name in arms}
    status = dict.fromkeys(arms, "completed")
    for turn in range(warmup + repeats):
        gc.collect()  # so that a collection is less likely to fall into somebody's step
        names = [name for name in arms if status[name] == "completed"]
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            try:
                took = _time_call(arms[name], clock)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                status[name] = "out_of_memory"
            else:
                if turn >= warmup:
                    seconds[name][turn] = took
                continue
            # Outside the except block: the exception's traceback held the tensors of the step.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    reference = seconds[baseline] if status[baseline] == "completed" else {}
    results = {}
    for name in arms:
        own = seconds[name] if status[name] == "completed" else {}
        ratios = [own[turn] / reference[turn] for turn in own if reference.get(turn)]
        results[name] = {
            "status": status[name],
            "median_seconds": _median(list(own.values())),
            "iqr_seconds": _quartiles(list(own.values())),
            "ratio": _median(ratios),
            "ratio_iqr": _quartiles(ratios),
            "seconds": list(own.values()),
            "ratios": ratios,
        }
    return {"baseline": baseline, "warmup": warmup, "repeats": repeats, "arms": results}


def _time_call(call: Callable[[], None], clock: Callable[[], float]) -> float:
    _synchronise()
    start = clock()
    call()
    _synchronise()
    return clock() - start


def _synchronise() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _quartiles(values: list[float]) -> list[float] | None:
    """First and third quartile; both the value itself where there is one only."""
    if len(values) < 2:
        return [values[0], values[0]] if values else None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]
