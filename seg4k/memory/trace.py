"""Tracing one training step on fake tensors: its peak, where it falls, and what it is made of.

Nothing is computed and nothing is allocated, so a 4K step of a large model takes seconds on a laptop. The
step is the real one: the configured model and loss, autograd, recomputation and the optimizer run as they
are; only the tensors have no data. What no trace can see are the workspaces of libraries, the CUDA context
and fragmentation.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from seg4k.activation_checkpointing import offload
from seg4k.activation_checkpointing.plan import Plan
from seg4k.memory.cpu_rules import library_bytes
from seg4k.memory.cuda_rules import ALLOCATION_BYTES, cuda_rules
from seg4k.memory.distributed import Buckets, coming_and_going, one_of
from seg4k.memory.follower import Follower
from seg4k.memory.operand_copies import copied_operand_bytes
from seg4k.memory.recorder import Record, Recorder
from seg4k.memory.step import Step, autocast, faked
from seg4k.memory.storages import own_part, tensors_in
from seg4k.memory.tally import Noted, held_by, tally
from seg4k.memory.traced import Argument, Trace

__all__ = ["Trace", "trace"]


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
    `rules` is "cuda", and its process group is taken where the step is one of several processes';
    `seg4k.memory.tracer` gives the step a process of its own.

    Args:
        step: what to trace.
        plan: None for a model that was prepared already, or that recomputes nothing.
        rules: "cuda", or "cpu" to hold the trace against a step measured on the CPU.
        apply: puts a plan on a model; `apply_activation_checkpointing` by default.
        with_held: also find out who holds what; see `Held`. The hooks that tell it add some work.
    """
    cuda = rules == "cuda"
    if step.shard is not None:  # which cannot be undone
        step = replace(step, model=copy.deepcopy(step.model))
    model = step.model
    recorder = Recorder(ALLOCATION_BYTES, copied_operand_bytes) if cuda else Recorder(library=library_bytes)
    with ExitStack() as stack:
        if cuda:
            stack.enter_context(cuda_rules())
        stack.enter_context(_host_copies(recorder, elsewhere=cuda))
        mesh = stack.enter_context(one_of(step.processes)) if step.shard is not None else None
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        faked((model, *step.modules))
        if plan is not None:
            (apply or _apply)(model, plan)
            if step.shard is None:
                stack.callback(apply or _apply, model, Plan())
        if step.shard is not None:
            assert mesh is not None
            step.shard(model, mesh)
            stack.enter_context(coming_and_going(recorder))
        segments = model.segments()  # type: ignore[operator]
        follower = Follower(recorder, model, segments)
        stack.callback(follower.close)
        return _Run(step, recorder, follower, list(segments), cuda, with_held).trace()


def _apply(model: nn.Module, plan: Plan) -> None:
    from seg4k.activation_checkpointing.apply import apply_activation_checkpointing

    apply_activation_checkpointing(model, plan, audit="off")


@contextmanager
def _host_copies(recorder: Recorder, *, elsewhere: bool) -> Iterator[None]:
    """Have offloaded tensors leave the device, and come back as new ones, as they do on CUDA.

    Where host memory is not `elsewhere`, they are copies in the same memory, as on the CPU.
    """

    class Elsewhere(offload.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            self.device, self.ready = tensor.device, None
            self.bytes = tensor.numel() * tensor.element_size()
            with recorder.on_host(self.bytes):
                self.host = tensor.detach().clone()

        def back(self) -> torch.Tensor:
            with recorder.on_host(self.bytes):
                pass
            return torch.empty_like(self.host)

    class Here(offload.HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            recorder.record_of(self.host)  # it was made past the recorder

    plain = offload.HostCopy
    offload.HostCopy = Elsewhere if elsewhere else Here  # type: ignore[misc]
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
        segments: list[str],
        cuda: bool,
        with_held: bool,
    ) -> None:
        self.step, self.recorder, self.follower, self.cuda = step, recorder, follower, cuda
        self.names = [*segments, "input", "loss", "optimizer"]
        self.parameters = [p for p in step.model.parameters() if p.requires_grad]
        self.buckets = Buckets(step.model) if step.buckets else None
        self.is_last = False  # of the batches of the step
        self.noted = Noted() if with_held else None
        self.alive_at_backward: list[Record] = []

    def trace(self) -> Trace:
        step, recorder = self.step, self.recorder
        modules = (step.model, *step.modules)
        step.model.train()
        copies = [torch.empty_like(tensor) for _ in range(step.copies) for tensor in tensors_in(step.model)]
        batch = step.make_batch()
        optimizer = self._optimizer()
        with recorder:
            recorder.hold(tensors_in([modules, copies]), "parameters", on_host=step.state_on_host)
            recorder.hold(batch.values(), "inputs")
            if self.buckets is not None:
                recorder.hold(self.buckets.tensors(), "gradients")
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(self._gradient)  # type: ignore[no-untyped-call]
            if not step.is_first:
                self._step_before(optimizer)
            recorder.restart()
            self._one_step(batch, optimizer)
            self._hold(optimizer)
        held = None if self.noted is None else held_by(recorder, self.noted)
        return tally(recorder, self.names, self.alive_at_backward, held)

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.step.optimizer(self.step.model)
        if self.cuda:  # what optimizers choose by themselves for CUDA tensors
            for group in optimizer.param_groups:
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True
        return optimizer

    def _step_before(self, optimizer: torch.optim.Optimizer) -> None:
        """What the step before leaves: the optimizer's state, and gradients that are still there."""
        for parameter in self.parameters:
            if self.buckets is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                self.buckets.take(parameter)
        optimizer.step()
        if self.step.zero_grad == "after_step":
            optimizer.zero_grad()
        self._hold(optimizer)

    def _hold(self, optimizer: torch.optim.Optimizer) -> None:
        on_host = self.step.state_on_host
        self.recorder.hold(tensors_in(optimizer), "optimizer", on_host=on_host)
        gradients = (p.grad for p in self.parameters if p.grad is not None)
        self.recorder.hold(gradients, "gradients", on_host=on_host)

    def _gradient(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self.buckets is not None and self.is_last:
            gradient = self.buckets.take(parameter)
        self.recorder.record_of(gradient).kind = "gradients"

    def _one_step(self, batch: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        step, recorder = self.step, self.recorder
        count = min(step.accumulate, 2)  # the second batch of an accumulated step stands for all later ones
        for index in range(count):
            last = self.is_last = index == count - 1
            recorder.count_operations = last
            noted = self.noted if last else None
            self.follower.entered = None if noted is None else self._note_inputs
            self.follower.start("forward")
            with nullcontext() if noted is None else self._noting_saved(noted), autocast(step.precision):
                loss = step.loss(step.model, batch) / step.accumulate
            if last:
                self.alive_at_backward = [r for r in recorder.records if r.freed is None]
            if index == 0 and step.zero_grad == "before_backward":
                optimizer.zero_grad()
            self.follower.start("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
        self.follower.start("optimizer")
        with recorder.on_host(0) if step.state_on_host else nullcontext():
            if step.clip is not None:
                self._clip()
            optimizer.step()

    def _clip(self) -> None:
        gradients = [own_part(p.grad) for p in self.parameters if p.grad is not None]
        torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        torch._foreach_mul_(gradients, 1.0)

    def _note_inputs(self, name: str, inputs: tuple[object, ...]) -> None:
        assert self.noted is not None
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor):
                record = self.recorder.record_of(tensor)
                self.noted.inputs.setdefault(name, []).append(record)
                if not offload._worth_moving(tensor):
                    self.noted.fixed_inputs.setdefault(name, []).append(record)
        self.noted.arguments.setdefault(name, tuple(map(Argument.of, inputs)))

    @contextmanager
    def _noting_saved(self, noted: Noted) -> Iterator[None]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            noted.saved.setdefault(self.recorder.place.name, []).append(self.recorder.record_of(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
