"""One call of a recomputed segment: what its forward does in place of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from seg4k.activation_checkpointing.audit import Audit
from seg4k.activation_checkpointing.errors import inexact
from seg4k.activation_checkpointing.fingerprint import can_be_read
from seg4k.activation_checkpointing.guards import check_unchanged, version
from seg4k.activation_checkpointing.norms import running_statistics, statistics_as_before, values_of
from seg4k.activation_checkpointing.offload import boundary_hooks
from seg4k.activation_checkpointing.plan import Policy
from seg4k.activation_checkpointing.selective import AttentionKeeper, compiled_contexts, no_attention

AuditMode = Literal["first_step", "always", "off"]
AUDITS: tuple[AuditMode, ...] = ("first_step", "always", "off")


@dataclass
class SegmentState:
    """What a recomputed segment's module carries in its `__dict__`.

    A plain value, so that copies and pickles of the model are complete and independent.
    """

    name: str
    policy: Policy
    audit: AuditMode
    audited: bool = False


class Observer:
    """Told when a segment runs; measurements count with it."""

    def enter(self, segment: str, recompute: bool) -> None:
        """Before a segment's inputs are saved and it runs, or before it is recomputed."""

    def leave(self, segment: str, recompute: bool) -> None:
        """After it, however it ended."""


_observers: list[Observer] = []


@contextmanager
def _observed(segment: str, recompute: bool) -> Iterator[None]:
    for observer in _observers:
        observer.enter(segment, recompute)
    try:
        yield
    finally:
        for observer in _observers:
            observer.leave(segment, recompute)


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell an observer of every segment's runs inside the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def runs_plainly(module: nn.Module) -> bool:
    """Whether a segment runs its own forward: nothing is to be trained, or a graph is being exported."""
    return (
        not module.training
        or not torch.is_grad_enabled()
        or torch.compiler.is_exporting()
        or torch._C._get_tracing_state() is not None
    )


class SegmentCall:
    """The function that `torch.utils.checkpoint` runs in forward, and again in backward.

    Args:
        state: the segment's.
        modules: the modules that it runs, by full name: one, or those of a run.
        body: their forward.
        leaves: all arguments, flat, with None in the places of tensors.
        places: the places of the tensors among them.
        spec: how to rebuild the arguments.
    """

    def __init__(
        self,
        state: SegmentState,
        modules: Mapping[str, nn.Module],
        body: Callable[..., Any],
        leaves: list[Any],
        places: Sequence[int],
        spec: TreeSpec,
    ) -> None:
        self.state = state
        self.modules = modules
        self.body = body
        self.leaves = leaves
        self.places = places
        self.spec = spec
        self.keeper: AttentionKeeper | None = None
        self.audit: Audit | None = None
        self.training = self._training_flags()
        self.statistics = running_statistics(modules.values())
        self.statistics_before = values_of(self.statistics)
        self._has_run = False

    def __call__(self, *tensors: Tensor) -> Any:  # noqa: ANN401
        """Run the body on these tensors."""
        if not self._has_run:
            self._has_run = True
            return self._forward(tensors)
        with _observed(self.state.name, recompute=True):
            return self._recompute(tensors)

    def _forward(self, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
        state = self.state
        with ExitStack() as stack:
            if self.keeper is not None:
                stack.enter_context(self.keeper)
            if state.audit != "off" and not state.audited and all(map(can_be_read, tensors)):
                self.audit = Audit(state.name, self.modules)
                stack.enter_context(self.audit.forward(tensors))
            return self._run(tensors)

    def _recompute(self, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
        if self._training_flags() != self.training:
            raise inexact(
                self.state.name,
                "train() or eval() was called on a module in it between its forward pass and backward",
                "Call it after backward",
            )
        with ExitStack() as stack:
            stack.enter_context(statistics_as_before(self.statistics, self.statistics_before))
            if self.keeper is not None:
                stack.enter_context(self.keeper)
            audit, self.audit = self.audit, None
            if audit is not None:
                self.state.audited = self.state.audit == "first_step"
                stack.enter_context(audit.recompute(tensors))
            return self._run(tensors)

    def _run(self, tensors: Sequence[Tensor]) -> Any:  # noqa: ANN401
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.body(*args, **kwargs)

    def _training_flags(self) -> list[bool]:
        return [inner.training for module in self.modules.values() for inner in module.modules()]


def run_segment(
    state: SegmentState,
    modules: Mapping[str, nn.Module],
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Run the body of a segment so that its activations are recomputed in backward.

    Raises:
        ActivationCheckpointingError: it changes its own input in place; in backward, see `guards`, `audit`.
        UserError: it is selective and no attention ran in it.
    """
    leaves, spec = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors: list[Tensor] = [leaves[place] for place in places]
    if not _needs_gradient(tensors, modules):
        return body(*args, **kwargs)
    for place in places:
        leaves[place] = None
    call = SegmentCall(state, modules, body, leaves, places, spec)
    hooks = boundary_hooks(state.name, len(tensors), offload=state.policy is Policy.OFFLOAD)
    options: dict[str, Any] = {}
    if state.policy is Policy.SELECTIVE:
        call.keeper = AttentionKeeper(state.name, hooks)
        options = {"context_fn": call.keeper.contexts}
    before = [version(tensor) for tensor in tensors]
    with _observed(state.name, recompute=False), hooks:
        result = checkpoint(call, *tensors, use_reentrant=False, **options)
    check_unchanged(state.name, tensors, before)
    if call.keeper is not None and call.keeper.kept == 0:
        raise no_attention(state.name)
    return result


def _needs_gradient(tensors: Sequence[Tensor], modules: Mapping[str, nn.Module]) -> bool:
    """Whether backward will reach the segment; a frozen one on an image keeps nothing, not even its input."""
    return any(tensor.requires_grad for tensor in tensors) or any(
        parameter.requires_grad for module in modules.values() for parameter in module.parameters()
    )


def compiled_segment(
    state: SegmentState,
    modules: nn.Module | Mapping[str, nn.Module],
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401
    """The same under torch.compile, in plain words that its tracer understands.

    The compiler traces the segment once, as a function without side effects; what the guards look for, it
    either refuses or makes right. Offload cannot be traced: such a segment runs in eager mode, between two
    graphs, and with `fullgraph=True` torch refuses, naming the function below. A segment's name is not looked
    at, so that equal segments share one graph.
    """
    if state.policy is Policy.OFFLOAD:
        return offload_cannot_be_compiled(state, modules, body, args, kwargs)
    if state.policy is Policy.SELECTIVE:
        return checkpoint(body, *args, use_reentrant=False, context_fn=compiled_contexts, **kwargs)
    return checkpoint(body, *args, use_reentrant=False, **kwargs)


@_disable_dynamo
def offload_cannot_be_compiled(
    state: SegmentState,
    modules: nn.Module | Mapping[str, nn.Module],
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Run an offloaded segment in eager mode while the rest of the model is compiled."""
    if isinstance(modules, nn.Module):
        modules = {state.name: modules}
    return run_segment(state, modules, body, args, kwargs)
