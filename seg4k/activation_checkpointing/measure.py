"""What a plan does, measured: bytes saved for backward and operations, per segment, and what it should do.

baseline = measure_segments(model, image, loss_fn=loss)
measured = measure_segments(model, image, loss_fn=loss, plan=plan)
assert predict_recompute_flops(baseline, plan) == {n: s.recompute_flops for n, s in measured.segments...}
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from seg4k.activation_checkpointing.apply import activation_checkpointing, remove_activation_checkpointing
from seg4k.activation_checkpointing.flops import FlopCount
from seg4k.activation_checkpointing.guards import alias_of
from seg4k.activation_checkpointing.offload import IS_HOST_COPY, TAKES_HOST_COPIES
from seg4k.activation_checkpointing.plan import Plan, Policy
from seg4k.activation_checkpointing.segment_call import Observer, observed_by
from seg4k.activation_checkpointing.segments import is_inside, members, segments_of
from seg4k.activation_checkpointing.selective import AttentionMarker


@dataclass(frozen=True)
class SegmentMeasurement:
    """One segment in one training step; what lies in a nested segment counts in its parent too."""

    saved_bytes: int
    """Memory on the device that its forward pass put aside for backward; not parameters, not the model's
    inputs, and not what an earlier segment put aside already."""
    host_bytes: int
    """The same in host memory, by offload."""
    forward_flops: int
    recompute_flops: int
    recomputations: int
    """How often its forward ran again in backward."""


@dataclass(frozen=True)
class Event:
    """A moment of the forward pass: a segment begins or ends, or a tensor is saved."""

    kind: Literal["enter", "leave", "save", "attention"]
    segment: str
    differentiable: bool
    flops: int
    attention: int


@dataclass(frozen=True)
class Measurement:
    """One training step: forward, loss, backward."""

    segments: Mapping[str, SegmentMeasurement]
    """Every segment of the model and every run of the plan."""
    saved_bytes: int
    """Of the whole step, loss included."""
    host_bytes: int
    forward_flops: int
    backward_flops: int
    """With what was recomputed."""
    events: tuple[Event, ...]

    @property
    def recompute_flops(self) -> int:
        """What all segments recomputed; no operation is recomputed in two segments at once."""
        return sum(segment.recompute_flops for segment in self.segments.values())


def measure_segments(
    model: nn.Module,
    *inputs: Any,  # noqa: ANN401
    loss_fn: Callable[[Any], Tensor],
    plan: Plan | None = None,
) -> Measurement:
    """Run one training step of a copy of a model under a plan, and count.

    Args:
        model: as for `apply_activation_checkpointing`; what is applied to it does not count.
        inputs: what the model takes.
        loss_fn: from the model's result to a scalar.
        plan: None recomputes nothing.
    """
    model = copy.deepcopy(model).train()
    remove_activation_checkpointing(model)
    plan = plan or Plan()
    marker = AttentionMarker()
    recorder = _Recorder(model, inputs, plan, marker)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=_cuda_devices(model)))
        stack.enter_context(activation_checkpointing(model, plan, audit="off"))
        stack.enter_context(observed_by(recorder))
        stack.enter_context(marker)
        stack.enter_context(recorder.flops)
        with recorder.hooks():
            loss = loss_fn(model(*inputs))
        forward_flops = recorder.flops.total
        loss.backward()  # type: ignore[no-untyped-call]
    recorder.remove()
    names = [*segments_of(model), *(name for name in plan if len(members(name)) > 1)]
    return Measurement(
        {
            name: SegmentMeasurement(
                recorder.saved[name],
                recorder.host[name],
                recorder.forward_flops[name],
                recorder.recompute_flops[name],
                recorder.recomputations[name],
            )
            for name in names
        },
        recorder.saved[""],
        recorder.host[""],
        forward_flops,
        recorder.flops.total - forward_flops,
        tuple(recorder.events),
    )


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


class _Recorder(Observer):
    """Keeps account of a step; the name of the whole model is empty."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any], plan: Plan, marker: AttentionMarker) -> None:
        self.saved: dict[str, int] = defaultdict(int)
        self.host: dict[str, int] = defaultdict(int)
        self.forward_flops: dict[str, int] = defaultdict(int)
        self.recompute_flops: dict[str, int] = defaultdict(int)
        self.recomputations: dict[str, int] = defaultdict(int)
        self.events: list[Event] = []
        self.flops = _Flops(marker, self)
        self.runs = {name for name in plan if len(members(name)) > 1}
        self.running: list[tuple[str, int]] = []
        self.recomputing: list[int] = []
        given = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
        self.seen = {t.untyped_storage()._cdata for t in given if isinstance(t, Tensor)}
        self.handles = [
            handle for name, module in segments_of(model).items() for handle in self._watch(name, module)
        ]

    def _watch(self, name: str, module: nn.Module) -> Sequence[Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
            given = [*tree_leaves((args, kwargs)), *module.parameters()]
            self._enter(name, any(isinstance(t, Tensor) and t.requires_grad for t in given))

        return (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(lambda *_: self._leave(name), always_call=True),
        )

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            self._save(tensor)
            return alias_of(tensor)

        setattr(pack, TAKES_HOST_COPIES, True)
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def enter(self, segment: str, recompute: bool) -> None:
        if recompute:
            self.recomputing.append(self.flops.total)
            self.recomputations[segment] += 1
        elif segment in self.runs:
            self._enter(segment, True)

    def leave(self, segment: str, recompute: bool) -> None:
        if recompute:
            self.recompute_flops[segment] += self.flops.total - self.recomputing.pop()
        elif segment in self.runs:
            self._leave(segment)

    def _enter(self, name: str, differentiable: bool) -> None:
        if not self.recomputing:
            self.running.append((name, self.flops.total))
            self.note("enter", name, differentiable and torch.is_grad_enabled())

    def _leave(self, name: str) -> None:
        if not self.recomputing:
            entered, flops = self.running.pop()
            assert entered == name
            self.forward_flops[name] += self.flops.total - flops
            self.note("leave", name)

    def _save(self, tensor: Tensor) -> None:
        self.note("save")
        storage = tensor.untyped_storage()
        if storage._cdata in self.seen:
            return
        self.seen.add(storage._cdata)
        account = self.host if hasattr(tensor, IS_HOST_COPY) else self.saved
        for name in ("", *(name for name, _ in self.running)):
            account[name] += storage.nbytes()

    def note(
        self,
        kind: Literal["enter", "leave", "save", "attention"],
        name: str = "",
        differentiable: bool = False,
    ) -> None:
        self.events.append(Event(kind, name, differentiable, self.flops.total, self.flops.attention))


class _Flops(FlopCount):  # type: ignore[no-untyped-call]
    def __init__(self, marker: AttentionMarker, recorder: _Recorder) -> None:
        super().__init__(marker)
        self.recorder = recorder

    def attention_ran(self) -> None:
        if not self.recorder.recomputing:
            self.recorder.note("attention")


def predict_recompute_flops(baseline: Measurement, plan: Plan) -> dict[str, int]:
    """The floating-point operations that a plan will recompute, per segment or run that it recomputes.

    Recomputation of a segment ends as soon as the last tensor that its forward pass saved is there again, so
    that what follows is not repeated; and a selective segment does not repeat its attention. Both are read
    from the course of a step that recomputes nothing.

    Args:
        baseline: measured without a plan.
        plan: for the same model.
    """
    return {
        name: sum(_recomputed(calls, name, plan) for calls in _calls(baseline.events, name))
        for name in plan.recomputed()
    }


def _calls(events: Sequence[Event], name: str) -> list[Sequence[Event]]:
    """The events of each call of a segment or run, from its `enter` to its `leave`."""
    first, last = members(name)[0], members(name)[-1]
    starts = [i for i, event in enumerate(events) if event.kind == "enter" and event.segment == first]
    ends = [i for i, event in enumerate(events) if event.kind == "leave" and event.segment == last]
    return [events[start : end + 1] for start, end in zip(starts, ends, strict=True)]


def _recomputed(events: Sequence[Event], name: str, plan: Plan) -> int:
    begin, stop = events[0], events[0]
    saves = False
    inner: list[str] = []
    nested = {
        member: other for other in plan.recomputed() if is_inside(other, name) for member in members(other)
    }
    for event in events:
        if event.kind == "enter" and event.segment in nested and event.differentiable:
            # An inner segment saves its inputs, through the outer one's hooks, before it runs.
            first = event.segment == members(nested[event.segment])[0]
            if first and not inner:
                saves, stop = True, event
            inner.append(event.segment)
        elif event.kind == "leave" and inner and event.segment == inner[-1]:
            inner.pop()
        elif (event.kind == "save" and not inner) or (
            event.kind == "attention" and inner and plan[nested[inner[-1]]] is Policy.SELECTIVE
        ):
            saves, stop = True, event
    if not saves:
        return 0
    kept = stop.attention - begin.attention if plan[name] is Policy.SELECTIVE else 0
    return stop.flops - begin.flops - kept
