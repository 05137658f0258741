"""Tracing one training step on fake tensors: its peak, where it falls, and what it is made of.

Nothing is computed and nothing is allocated, so a 4K step of a large model takes seconds on a laptop. The
step is the real one: the configured model and loss, autograd, recomputation and the optimizer run as they
are; only the tensors have no data. What no trace can see are the workspaces of libraries, the CUDA context
and fragmentation.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from seg4k.activation_checkpointing import offload
from seg4k.activation_checkpointing.plan import Plan
from seg4k.memory.cpu_rules import library_bytes
from seg4k.memory.cuda_rules import ALLOCATION_BYTES, cuda_rules
from seg4k.memory.recorder import Follower, Place, Record, Recorder
from seg4k.memory.step import Step, autocast, faked
from seg4k.memory.storages import tensors_in
from seg4k.memory.traced import KINDS, Held, Segment, Trace, around, outermost_of

__all__ = ["Trace", "trace"]

_POINTS = 60  # of the outline of live memory, per stretch between two marks


def trace(
    step: Step,
    plan: Plan | None = None,
    *,
    rules: str = "cuda",
    apply: Callable[[nn.Module, Plan], object] | None = None,
    with_held: bool = False,
) -> Trace:
    """Trace one optimizer step under a plan; Adam's state is there, as in every step but the first.

    The model is emptied: its tensors are fake afterwards. The process's autocast is changed meanwhile where
    `rules` is "cuda"; `seg4k.memory.tracer` gives the step a process of its own.

    Args:
        step: what to trace.
        plan: None for a model that was prepared already, or that recomputes nothing.
        rules: "cuda", or "cpu" to hold the trace against a step measured on the CPU.
        apply: puts a plan on a model; `apply_activation_checkpointing` by default.
        with_held: also find out who holds what; see `Held`. The hooks that tell it add some work.
    """
    cuda = rules == "cuda"
    model = step.model
    recorder = Recorder(ALLOCATION_BYTES) if cuda else Recorder(library=library_bytes)
    with ExitStack() as stack:
        if cuda:
            stack.enter_context(cuda_rules())
            stack.enter_context(_host_copies(recorder))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        faked((model, *step.modules))
        if plan is not None:
            (apply or _apply)(model, plan)
            stack.callback(apply or _apply, model, Plan())
        segments = model.segments()  # type: ignore[operator]
        follower = Follower(recorder, model, segments)
        stack.callback(follower.close)
        return _Run(step, recorder, follower, segments, cuda, with_held).trace()


def _apply(model: nn.Module, plan: Plan) -> None:
    from seg4k.activation_checkpointing.apply import apply_activation_checkpointing

    apply_activation_checkpointing(model, plan, audit="off")


@contextmanager
def _host_copies(recorder: Recorder) -> Iterator[None]:
    """Have offloaded tensors leave the device, and come back as new ones, as they do on CUDA."""

    class HostCopy(offload.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            self.device, self.ready = tensor.device, None
            self.bytes = tensor.numel() * tensor.element_size()
            with recorder.on_host(self.bytes):
                self.host = tensor.detach().clone()

        def back(self) -> torch.Tensor:
            with recorder.on_host(self.bytes):
                pass
            return torch.empty_like(self.host)

    plain = offload.HostCopy
    offload.HostCopy = HostCopy  # type: ignore[misc]
    try:
        yield
    finally:
        offload.HostCopy = plain  # type: ignore[misc]


class _Run:
    """One trace: the step, and what is noted of it."""

    def __init__(
        self,
        step: Step,
        recorder: Recorder,
        follower: Follower,
        segments: Mapping[str, nn.Module],
        cuda: bool,
        with_held: bool,
    ) -> None:
        self.step, self.recorder, self.follower, self.cuda = step, recorder, follower, cuda
        self.names = dict.fromkeys([*segments, "input", "loss", "optimizer"])
        self.with_held = with_held
        self.saved: dict[str, list[Record]] = {}
        self.inputs: dict[str, list[Record]] = {}
        self.fixed_inputs: dict[str, list[Record]] = {}
        self.alive_at_backward: list[Record] = []

    def trace(self) -> Trace:
        step, recorder = self.step, self.recorder
        modules = (step.model, *step.modules)
        step.model.train()
        copies = [torch.empty_like(tensor) for _ in range(step.copies) for tensor in tensors_in(step.model)]
        batch = step.make_batch()
        optimizer = self._optimizer()
        parameters = [p for p in step.model.parameters() if p.requires_grad]
        with recorder:
            recorder.hold(tensors_in([modules, copies]), "parameters")
            recorder.hold(batch.values(), "inputs")
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            if step.zero_grad == "after_step":
                optimizer.zero_grad()
            recorder.hold(tensors_in(optimizer), "optimizer")
            recorder.hold((p.grad for p in parameters if p.grad is not None), "gradients")
            recorder.restart()
            self._one_step(batch, optimizer, parameters)
            recorder.hold((p.grad for p in parameters if p.grad is not None), "gradients")
        return self._result()

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.step.optimizer(self.step.model)
        if self.cuda:  # what optimizers choose by themselves for CUDA tensors
            for group in optimizer.param_groups:
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True
        return optimizer

    def _gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.recorder.record_of(parameter.grad).kind = "gradients"

    def _one_step(
        self,
        batch: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        step, recorder = self.step, self.recorder
        count = min(step.accumulate, 2)  # the second batch of an accumulated step stands for all later ones
        for index in range(count):
            last = index == count - 1
            recorder.count_operations = last
            self.follower.entered = self._note_inputs if last and self.with_held else None
            self.follower.start("forward")
            noting = self._noting_saved() if last and self.with_held else nullcontext()
            with noting, autocast(step.precision):
                loss = step.loss(step.model, batch) / step.accumulate
            if last:
                self.alive_at_backward = [r for r in recorder.records if r.freed is None]
            if index == 0 and step.zero_grad == "before_backward":
                optimizer.zero_grad()
            self.follower.start("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        self.follower.start("optimizer")
        if step.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, step.clip, foreach=True if self.cuda else None)
        optimizer.step()

    def _note_inputs(self, name: str, inputs: tuple[object, ...]) -> None:
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor):
                record = self.recorder.record_of(tensor)
                self.inputs.setdefault(name, []).append(record)
                if not offload._worth_moving(tensor):
                    self.fixed_inputs.setdefault(name, []).append(record)

    @contextmanager
    def _noting_saved(self) -> Iterator[None]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.saved.setdefault(self.recorder.place.name, []).append(self.recorder.record_of(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def _result(self) -> Trace:
        recorder = self.recorder
        live = recorder.live
        peak = max(live)
        moment = live.index(peak)
        segments = {name: Segment() for name in self.names}
        for place, bytes_ in recorder.peaks.items():
            phase = "backward" if place.phase == "recompute" else place.phase
            own = segments[place.name].own_peaks
            own[phase] = max(own.get(phase, 0), bytes_)
            for name in around(place.name, segments):
                peaks = segments[name].peaks
                peaks[phase] = max(peaks.get(phase, 0), bytes_)
        for place, work in recorder.operations.items():
            for name in around(place.name, segments):
                segments[name].work.setdefault(place.phase, Counter()).update(work)
        for place, moved in recorder.moved.items():
            segments[place.name].moved[place.phase] += moved
        computed = [r for r in self.alive_at_backward if r.kind is None]
        for record in computed:
            for name in around(record.place.name, segments):
                segments[name].saved_bytes += record.bytes
        static = sum(
            record.bytes
            for record in recorder.records
            if record.kind in ("parameters", "optimizer", "gradients") and record.freed is None
        )
        outline, marks = self._outline()
        return Trace(
            peak_bytes=peak,
            peak_at=str(self._place_at(moment)),
            peak_kinds=self._kinds_at(moment, set(map(id, computed))),
            static_bytes=static,
            segments=segments,
            live=outline,
            marks=marks,
            held=self._held() if self.with_held else None,
        )

    def _place_at(self, moment: int) -> Place:
        place = Place("input", "forward")
        for index, mark in self.recorder.marks:
            if index > moment:
                break
            place = mark
        return Place(outermost_of(place.name, self.names), place.phase)

    def _kinds_at(self, moment: int, kept: set[int]) -> dict[str, int]:
        kinds = dict.fromkeys(KINDS, 0)
        for record in self.recorder.records:
            if record.born > moment or (record.freed is not None and record.freed <= moment):
                continue
            kind = record.kind
            if kind is None:
                recomputed = record.place.phase == "recompute"
                kind = "activations" if id(record) in kept or recomputed else "temporaries"
            kinds[kind] += record.bytes
        return kinds

    def _held(self) -> Held:
        index: dict[int, int] = {}
        records: list[Record] = []

        def numbers(table: dict[str, list[Record]]) -> dict[str, set[int]]:
            result: dict[str, set[int]] = {}
            for name, found in table.items():
                result[name] = set()
                for record in found:
                    if record.kind is None:
                        if id(record) not in index:
                            index[id(record)] = len(records)
                            records.append(record)
                        result[name].add(index[id(record)])
            return result

        attention: dict[str, list[Record]] = {}
        for record in self.recorder.attention:
            attention.setdefault(record.place.name, []).append(record)
        tables = [numbers(table) for table in (self.saved, self.inputs, self.fixed_inputs, attention)]
        return Held([r.bytes for r in records], [r.place.name for r in records], *tables)

    def _outline(self) -> tuple[list[int], list[tuple[int, str, str]]]:
        """Live memory with each stretch thinned to its largest values, and where the stretches begin."""
        live = self.recorder.live
        outline: list[int] = []
        marks: list[tuple[int, str, str]] = []
        stretches = _stretches(
            [
                (index, outermost_of(place.name, self.names), place.phase)
                for index, place in self.recorder.marks
            ]
        )
        ends = [start for start, _, _ in stretches[1:]] + [len(live)]
        for (start, name, phase), end in zip(stretches, ends, strict=True):
            if end > start:
                marks.append((len(outline), name, phase))
                size = -(-(end - start) // _POINTS)
                outline += [max(live[at : min(at + size, end)]) for at in range(start, end, size)]
        return outline, marks


def _stretches(marks: list[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """The marks that begin something new: no returns to code between segments, no taking of turns."""
    first = {(name, phase): index for index, (_, name, phase) in reversed(list(enumerate(marks)))}
    last_new = {phase: index for (_, phase), index in sorted(first.items(), key=lambda item: item[1])}
    kept: list[tuple[int, str, str]] = []
    turns: set[str] = set()  # the names that share the latest stretch
    for index, (moment, name, phase) in enumerate(marks):
        between = name == "loss" and phase == "forward" and index < last_new[phase]
        if between or (kept and kept[-1][2] == phase and name in turns):
            continue
        if len(kept) > 1 and kept[-2][1:] == (name, phase) and kept[-1][2] == phase:
            turns = {name, kept.pop()[1]}
            continue
        kept.append((moment, name, phase))
        turns = {name}
    return kept
