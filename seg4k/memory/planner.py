"""Choosing a policy per segment: the least added time whose memory fits at every position of the step.

A step is a chain of units. Each unit takes one of its choices, or is replaced by its parts, which choose
one by one. What a choice holds from its forward to its backward adds up along the chain; during the
backward of a unit its own transient bytes come on top. A tensor that several units may hold, as a skip
that is encoder output, boundary and decoder input at once, is counted once however many of them hold it.

That is a multiple-choice knapsack with one bound per position. Since a bound sees only what is held by
the units up to it, the best continuation depends on a prefix through two numbers and the set of shared
tensors already held; so a Pareto frontier over (bytes held, time) per such set, extended unit by unit,
contains the optimum. Times are counted in whole picoseconds and bytes are integers: no comparison is a
matter of rounding.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Choice", "Problem", "Solution", "Unit", "evaluate", "frontier", "smallest_budget", "solve"]


@dataclass(frozen=True)
class Choice:
    """One way to run a unit.

    Attributes:
        policy: its name.
        resident: bytes held from the unit's forward to its backward, shared tensors left out.
        transient: bytes beyond all held ones at the worst moment of the unit itself. May be negative where
            the unit lets go of what it holds before that moment.
        seconds: added to the step.
        holds: names of shared tensors that the unit holds.
    """

    policy: str
    resident: int
    transient: int
    seconds: float
    holds: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Unit:
    """A segment with its choices, or the finer segments in its place.

    Attributes:
        name: the segment's name.
        choices: ways to run the unit as one; may be empty where `parts` is not.
        parts: the same stretch of the chain as several units, in forward order.
    """

    name: str
    choices: tuple[Choice, ...]
    parts: tuple["Unit", ...] = ()


@dataclass(frozen=True)
class Problem:
    """A chain of units in forward order.

    Attributes:
        units: the chain.
        shared: bytes of each tensor that more than one choice names in `holds`.
        floor: bytes that some moment takes whatever is chosen (e.g. the optimizer's step).
    """

    units: tuple[Unit, ...]
    shared: Mapping[str, int] = field(default_factory=dict)
    floor: int = 0


@dataclass(frozen=True)
class Solution:
    """Policies by segment name, with the peak and the added time that the chain gives them."""

    policies: dict[str, str]
    peak: int
    seconds: float


# A state of the search: what is held, a value to keep small, and how it came about, latest choice first.
_State = tuple[int, int, Any]
_States = dict[frozenset[str], list[_State]]
_Value = Callable[[int, int, int], int | None]


def _picoseconds(seconds: float) -> int:
    return round(seconds * 1e12)


def _pareto(states: Iterable[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda entry: entry[:2]):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


def _advance(states: _States, unit: Unit, shared: Mapping[str, int], value: _Value) -> _States:
    """All states after `unit`. `value(old, at, time)` gives the new second number, None for over budget."""
    reached: dict[frozenset[str], list[_State]] = {}
    for held, front in states.items():
        for choice in unit.choices:
            fresh = choice.resident + sum(shared[name] for name in choice.holds - held)
            time = _picoseconds(choice.seconds)
            target = reached.setdefault(held | choice.holds, [])
            for resident, second, path in front:
                now = resident + fresh
                new = value(second, now + choice.transient, time)
                if new is not None:
                    target.append((now, new, (unit.name, choice.policy, path)))
    if unit.parts:
        inner = states
        for part in unit.parts:
            inner = _advance(inner, part, shared, value)
        for held, front in inner.items():
            reached.setdefault(held, []).extend(front)
    return {held: _pareto(front) for held, front in reached.items() if front}


def _holds(unit: Unit) -> Iterator[str]:
    for choice in unit.choices:
        yield from choice.holds
    for part in unit.parts:
        yield from _holds(part)


def _search(problem: Problem, start: int, value: _Value) -> list[_State]:
    last = {name: index for index, unit in enumerate(problem.units) for name in _holds(unit)}
    states: _States = {frozenset(): [(0, start, None)]}
    for index, unit in enumerate(problem.units):
        advanced = _advance(states, unit, problem.shared, value)
        merged: dict[frozenset[str], list[_State]] = {}
        for held, front in advanced.items():  # a tensor that no later unit can hold tells nothing any more
            merged.setdefault(frozenset(name for name in held if last[name] > index), []).extend(front)
        states = {held: _pareto(front) for held, front in merged.items()}
    return [state for front in states.values() for state in front]


def _policies(path: Any) -> dict[str, str]:  # noqa: ANN401 - a linked list of unit, policy, rest
    chosen = []
    while path is not None:
        name, policy, path = path
        chosen.append((name, policy))
    return dict(reversed(chosen))


def evaluate(problem: Problem, policies: Mapping[str, str]) -> Solution:
    """Peak and added time of given policies: a name per unit, or per part in place of its unit.

    Raises:
        KeyError: where neither a unit nor all its parts are named.
    """
    resident, peak, time = 0, problem.floor, 0
    held: frozenset[str] = frozenset()

    def walk(units: Iterable[Unit]) -> None:
        nonlocal resident, peak, time, held
        for unit in units:
            if unit.name not in policies and unit.parts:
                walk(unit.parts)
                continue
            choice = next(c for c in unit.choices if c.policy == policies[unit.name])
            resident += choice.resident + sum(problem.shared[name] for name in choice.holds - held)
            held |= choice.holds
            peak = max(peak, resident + choice.transient)
            time += _picoseconds(choice.seconds)

    walk(problem.units)
    return Solution(dict(policies), peak, time / 1e12)


def _fastest(problem: Problem, budget: int) -> Solution | None:
    if budget < problem.floor:
        return None
    states = _search(problem, 0, lambda old, at, time: old + time if at <= budget else None)
    if not states:
        return None
    return evaluate(problem, _policies(min(states, key=lambda state: (state[1], state[0]))[2]))


def solve(problem: Problem, budget: int) -> Solution | None:
    """The least added time with a peak of at most `budget` bytes, and of these the smallest peak.

    Returns:
        The solution, or None where nothing fits.
    """
    best = _fastest(problem, budget)
    while best is not None:
        lower = _fastest(problem, best.peak - 1)
        if lower is None or _picoseconds(lower.seconds) > _picoseconds(best.seconds):
            break
        best = lower
    return best


def smallest_budget(problem: Problem) -> int:
    """The smallest peak that any choice of policies reaches, in bytes."""
    states = _search(problem, problem.floor, lambda old, at, time: max(old, at))
    return min(state[1] for state in states)


def frontier(problem: Problem, limit: int = 10_000) -> list[Solution]:
    """Every solution that no other beats in both time and peak, fastest first, up to `limit` of them."""
    found: list[Solution] = []
    best = _fastest(problem, sum(problem.shared.values()) + _ceiling(problem))
    while best is not None and len(found) < limit:
        if found and _picoseconds(found[-1].seconds) == _picoseconds(best.seconds):
            found.pop()
        found.append(best)
        best = _fastest(problem, best.peak - 1)
    return found


def _ceiling(problem: Problem) -> int:
    def most(unit: Unit) -> int:
        whole = max((abs(c.resident) + abs(c.transient) for c in unit.choices), default=0)
        return max(whole, sum(most(part) for part in unit.parts))

    return problem.floor + sum(most(unit) for unit in problem.units)


def at_budget(solutions: list[Solution], budget: int) -> Solution | None:
    """The fastest of a frontier's solutions whose peak is at most `budget`."""
    # Peaks fall along the frontier; look for the first that fits.
    index = bisect_right([-solution.peak for solution in solutions], -budget - 1)
    return solutions[index] if index < len(solutions) else None
