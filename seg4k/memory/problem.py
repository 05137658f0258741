"""The planner's view of a step: what each segment holds, needs meanwhile, and costs under each policy.

All of it is read off a few traces in which every segment has the same policy. What a kept segment holds is
what autograd saved for it; a recomputed one holds its inputs; a selective one attention's results too; an
offloaded one only what cannot be moved. A storage that several segments may hold becomes one shared tensor
of the problem. The worst moment of a segment is taken from the trace in which it has the policy, less what
the problem says is held then: so the problem agrees with those traces exactly, and with mixtures of them
nearly.
"""

from collections.abc import Iterable, Mapping, Sequence

from seg4k.activation_checkpointing.plan import Plan, Policy
from seg4k.memory.costs import added_seconds
from seg4k.memory.devices import Device
from seg4k.memory.planner import Choice, Problem, Unit
from seg4k.memory.traced import Held, Segment, Trace
from seg4k.memory.tracer import Tracer

__all__ = ["POLICIES", "build_problem", "outermost", "plan_of"]

POLICIES = (Policy.RECOMPUTE, Policy.SELECTIVE, Policy.OFFLOAD)
_REST = ":rest"  # what a segment does outside the segments inside it
_SMALL = 1 << 20  # shared storages below are counted for each of their holders


def build_problem(tracer: Tracer, device: Device, policies: Sequence[Policy] = POLICIES) -> Problem:
    """Trace a step under uniform plans, and state the choice between policies as a problem.

    Args:
        tracer: of the step.
        device: whose figures give the times.
        policies: those to choose from, beside keeping.
    """
    return _Builder(tracer, device, policies).problem()


def plan_of(policies: Mapping[str, str]) -> Plan:
    """The plan that a solution's policies make."""
    return Plan({n: p for n, p in policies.items() if p != Policy.KEEP and not n.endswith(_REST)})


def outermost(names: Iterable[str]) -> list[str]:
    """The segments that lie in no other, in forward order."""
    names = list(names)
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def uniform_plan(names: Iterable[str], policy: Policy, attention: Iterable[str]) -> Plan:
    """One policy for all; where there is no attention to keep, selective is recompute."""
    attention = set(attention)
    plain = Policy.RECOMPUTE if policy is Policy.SELECTIVE else policy
    return Plan({name: policy if name in attention else plain for name in names})


def _within(table: Mapping[str, set[int]], name: str) -> set[int]:
    """The union of a table's entries for a segment and all inside it."""
    found = [entry for other, entry in table.items() if other == name or other.startswith(f"{name}.")]
    return set().union(*found)


def _peak(segment: Segment, own: bool = False) -> int:
    return max((segment.own_peaks if own else segment.peaks).values(), default=0)


class _Prefix:
    """What a walk along the chain has met so far as held."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.bytes = 0
        self.shared: frozenset[str] = frozenset()

    def add(self, own: int, shared: frozenset[str]) -> None:
        self.bytes += own + sum(self.sizes[name] for name in shared - self.shared)
        self.shared |= shared


class _Builder:
    """Puts the problem together from the traces."""

    def __init__(self, tracer: Tracer, device: Device, policies: Sequence[Policy]) -> None:
        self.device = device
        names = tracer.segment_names
        self.tops = outermost(names)
        inside = {top: outermost(n for n in names if n.startswith(f"{top}.")) for top in self.tops}
        self.parts = {top: parts if len(parts) > 1 else [] for top, parts in inside.items()}
        self.base = tracer.trace(Plan())
        held = tracer.trace(Plan(), with_held=True).held
        assert held is not None
        self.held: Held = held
        attention = [name for name in names if _within(self.held.attention, name)]
        fine = [part for top in self.tops for part in self.parts[top] or [top]]
        plans = [uniform_plan(units, policy, attention) for policy in policies for units in (self.tops, fine)]
        self.traces = {Plan(): self.base} | {plan: tracer.trace(plan) for plan in plans}
        self.sizes: dict[str, int] = {}
        self.owner = self._find_shared(fine)
        self.transients: dict[tuple[str, Policy], int] = {}
        self.seconds: dict[tuple[str, Policy], float] = {}
        for plan, trace in self.traces.items():
            self._walk(plan, trace)

    def problem(self) -> Problem:
        """The chain of units."""
        chain = [self._unit("input")]
        for top in self.tops:
            parts = [self._unit(part) for part in self.parts[top]]
            chain.append(self._unit(top, (*parts, self._unit(top + _REST)) if parts else ()))
        chain.append(self._unit("loss"))
        return Problem(tuple(chain), self.sizes, _peak(self.base.segments["optimizer"]))

    def _unit(self, name: str, parts: tuple[Unit, ...] = ()) -> Unit:
        choices = []
        for (other, policy), transient in self.transients.items():
            if other == name:
                own, shared = self._holding(name, policy)
                seconds = self.seconds[name, policy]
                choices.append(Choice(policy.value, own, transient, seconds, shared))
        return Unit(name, tuple(choices), parts)

    def _walk(self, plan: Plan, trace: Trace) -> None:
        """Note the transients and the times of one trace."""
        prefix = _Prefix(self.sizes)

        def visit(name: str, policy: Policy, peak: int, seconds: float = 0.0) -> None:
            prefix.add(*self._holding(name, policy))
            key = (name, policy)
            # What has no choice is met in every trace. The first keeps everything: there, whatever is alive
            # is held, whereas a boundary on its way to the host is alive for its caller, and held by
            # nobody.
            self.transients.setdefault(key, peak - prefix.bytes)
            self.seconds.setdefault(key, seconds)

        segments = trace.segments
        visit("input", Policy.KEEP, _peak(segments["input"], own=True))
        for top in self.tops:
            if self.parts[top] and top not in plan:
                for part in self.parts[top]:
                    visit(part, plan.policy(part), _peak(segments[part]), self._added(trace, part))
                visit(top + _REST, Policy.KEEP, _peak(segments[top], own=True))
            else:
                visit(top, plan.policy(top), _peak(segments[top]), self._added(trace, top))
        visit("loss", Policy.KEEP, _peak(segments["loss"], own=True))

    def _added(self, trace: Trace, name: str) -> float:
        # The loss may recompute a segment itself, whatever the plan: that is not the plan's cost.
        return added_seconds(trace, name, self.device) - added_seconds(self.base, name, self.device)

    def _storages(self, name: str, policy: Policy) -> set[int]:
        """The storages that a segment holds under a policy."""
        if policy is Policy.OFFLOAD:
            return self.held.fixed_inputs.get(name, set())
        if name.endswith(_REST):
            return self.held.saved.get(name.removesuffix(_REST), set())
        if policy is Policy.KEEP:
            return _within(self.held.saved, name)
        boundary = self.held.inputs.get(name, set())
        return boundary | _within(self.held.attention, name) if policy is Policy.SELECTIVE else boundary

    def _find_shared(self, fine: Sequence[str]) -> dict[int, str]:
        """The storages that several segments may hold, each with the name of its bundle."""
        holders: dict[int, set[str]] = {}
        rests = [top + _REST for top in self.tops if self.parts[top]]
        for name in (*fine, *rests, "input", "loss"):
            for policy in (Policy.KEEP, Policy.SELECTIVE):
                for storage in self._storages(name, policy):
                    holders.setdefault(storage, set()).add(name)
        for top in self.tops:  # a stage begins where its first part does
            for storage in self._storages(top, Policy.RECOMPUTE):
                holders.setdefault(storage, set()).add((self.parts[top] or [top])[0])
        bundles: dict[str, list[int]] = {}
        for storage, names in holders.items():
            if len(names) > 1:
                bundles.setdefault(" ".join(sorted(names)), []).append(storage)
        owner: dict[int, str] = {}
        for bundle, storages in bundles.items():
            size = sum(self.held.bytes[storage] for storage in storages)
            if size >= _SMALL:
                self.sizes[bundle] = size
                owner |= dict.fromkeys(storages, bundle)
        return owner

    def _holding(self, name: str, policy: Policy) -> tuple[int, frozenset[str]]:
        """Bytes that only this segment may hold, and the shared tensors that it holds."""
        storages = self._storages(name, policy)
        own = sum(self.held.bytes[storage] for storage in storages if storage not in self.owner)
        return own, frozenset(self.owner[storage] for storage in storages if storage in self.owner)
