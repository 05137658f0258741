"""The cheapest plan that fits a budget, promised by a trace of that very plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from seg4k.activation_checkpointing.plan import Plan, Policy
from seg4k.memory.costs import step_seconds
from seg4k.memory.devices import Device
from seg4k.memory.planner import Problem, smallest_budget, solve
from seg4k.memory.problem import POLICIES, build_problem, plan_of
from seg4k.memory.traced import Trace
from seg4k.memory.tracer import Tracer

__all__ = ["AutoPlanner", "PlannedStep"]

_ATTEMPTS = 12


@dataclass(frozen=True)
class PlannedStep:
    """A plan and the trace of the step under it."""

    plan: Plan
    trace: Trace
    seconds: float


class AutoPlanner:
    """Finds plans for one step on one device, at any number of budgets.

    The problem states what plans cost; the trace decides. A plan whose trace is over the budget is replaced
    by the best one whose peak, as the problem sees it, is lower by what was too much. The uniform modes
    stand in competition, so that none of them is ever better than what is found.

    Args:
        tracer: of the step.
        device: whose figures give the times.
        policies: those to choose from, beside keeping.
    """

    def __init__(self, tracer: Tracer, device: Device, policies: Sequence[Policy] = POLICIES) -> None:
        self.tracer = tracer
        self.device = device
        self.policies = tuple(policies)
        self.problem: Problem = build_problem(tracer, device, policies)

    def planned(self, plan: Plan) -> PlannedStep:
        """The trace of a plan, and its time."""
        trace = self.tracer.trace(plan)
        return PlannedStep(plan, trace, step_seconds(trace, self.device))

    @property
    def baseline(self) -> PlannedStep:
        """The step with nothing recomputed."""
        return self.planned(Plan())

    def known(self) -> list[PlannedStep]:
        """The steps traced so far whose plans use no other policies than this planner may."""
        allowed = {Policy.KEEP, *self.policies}
        return [self.planned(plan) for plan in self.tracer.plans if set(plan.values()) <= allowed]

    def at(self, budget: int) -> PlannedStep | None:
        """The fastest plan found whose traced peak is at most `budget` bytes; None where none fits."""
        candidates = [step for step in self.known() if step.trace.peak_bytes <= budget]
        target = budget
        for _ in range(_ATTEMPTS):
            solution = solve(self.problem, target)
            if solution is None:
                break
            step = self.planned(plan_of(solution.policies))
            excess = step.trace.peak_bytes - budget
            if excess <= 0:
                candidates.append(step)
                break
            target = min(target, solution.peak) - excess
        return min(candidates, key=lambda s: (s.seconds, s.trace.peak_bytes), default=None)

    def smallest(self) -> PlannedStep:
        """The plan with the smallest traced peak that was found, the fastest of those."""
        lowest = smallest_budget(self.problem)
        steps = self.known()
        for slack in (0.0, 0.01, 0.02):
            solution = solve(self.problem, int(lowest * (1 + slack)))
            assert solution is not None
            steps.append(self.planned(plan_of(solution.policies)))
        return min(steps, key=lambda step: (step.trace.peak_bytes, step.seconds))
