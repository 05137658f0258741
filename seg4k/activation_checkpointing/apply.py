"""Applying a plan to a model from outside, and taking it off again.

No module is wrapped and none is replaced: the class of a segment's module is swapped for a subclass of it whose
`forward` recomputes. Names of parameters and buffers, and so weights files, are the same under every plan, and
what is put on top (hooks, DDP, FSDP2) works as on the plain model. Put it on in this order: activation
checkpointing, then compile, then DDP or FSDP.
"""

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from seg4k.activation_checkpointing.errors import inexact
from seg4k.activation_checkpointing.forward import (
    AUDITS,
    AuditMode,
    SegmentState,
    compiled_segment,
    run_segment,
    runs_plainly,
)
from seg4k.activation_checkpointing.plan import Plan
from seg4k.activation_checkpointing.segments import members, segments_of, unknown_segment
from seg4k.errors import UserError

logger = logging.getLogger(__name__)

_STATE = "_seg4k_segment"
_RUN = "_seg4k_run"
_APPLIED = "_seg4k_activation_checkpointing"


@dataclass(frozen=True)
class AppliedPlan:
    """What `apply_activation_checkpointing` did to a model."""

    plan: Plan
    audit: AuditMode
    recomputed: tuple[str, ...]
    """Segments and runs whose activations are recomputed."""
    made_out_of_place: tuple[str, ...]
    """In-place modules, by their name in the model, that run out of place until the plan is removed."""


@dataclass
class RunState:
    """What the modules of a run of siblings share."""

    segment: SegmentState
    modules: tuple[nn.Module, ...]
    handed_on: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False)
    """A weak reference to what the first gave, and its further arguments, until the last has passed it on."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handed_on": None}


def apply_activation_checkpointing(
    model: nn.Module, plan: Plan, *, audit: AuditMode = "first_step"
) -> AppliedPlan:
    """Recompute the segments of a model as a plan says.

    Applying a plan takes off the one before. In-place modules inside recomputed segments (`ReLU(inplace=True)`)
    run out of place from here on, since what they overwrite may be a segment's input.

    Args:
        model: has `segments()`, see `segments_of`.
        plan: see `make_plan`.
        audit: watch every operation of each segment in the first step (`first_step`), in each (`always`) or in
            none (`off`); see `audit`. The cheap guard, see `guards`, is always on.

    Raises:
        UserError: the plan names what is no segment of the model, or a run that is none; one module is two of
            its segments; FSDP was put on first.
    """
    if audit not in AUDITS:
        raise UserError(f"activation_checkpointing.audit={audit}: choose one of {', '.join(AUDITS)}")
    segments = segments_of(model)
    targets = {name: find(name, segments) for name in plan.recomputed()}
    check_targets(targets)
    remove_activation_checkpointing(model)
    full_names = {id(module): name for name, module in model.named_modules()}
    switched: list[str] = []
    for name, modules in targets.items():
        state = SegmentState(name, plan[name], audit)
        if len(modules) == 1:
            module = modules[0]
            state.inplace = tuple(make_out_of_place(module))
            switched += [joined(full_names.get(id(module), name), inner) for inner in state.inplace]
            module.__dict__[_STATE] = state
            module.__class__ = segment_class(type(module))
            continue
        run = RunState(state, tuple(modules))
        for module, member in zip(modules, members(name), strict=True):
            inner_names = tuple(make_out_of_place(module))
            switched += [joined(full_names.get(id(module), member), inner) for inner in inner_names]
            module.__dict__[_RUN] = (run, inner_names)
            module.__class__ = run_member_class(type(module))
    if switched:
        logger.info(
            "made %d in-place modules inside recomputed segments out-of-place: %s",
            len(switched),
            ", ".join(switched),
        )
    applied = AppliedPlan(plan, audit, tuple(targets), tuple(switched))
    model.__dict__[_APPLIED] = applied
    return applied


def remove_activation_checkpointing(model: nn.Module) -> None:
    """Take a plan off again: classes and `inplace` flags are as they were. Without a plan, nothing happens."""
    for module in model.modules():
        state: SegmentState | None = module.__dict__.pop(_STATE, None)
        run: tuple[RunState, tuple[str, ...]] | None = module.__dict__.pop(_RUN, None)
        inplace = (*(state.inplace if state else ()), *(run[1] if run else ()))
        for name in inplace:
            module.get_submodule(name).inplace = True  # type: ignore[assignment]
        plain = type(module).__dict__.get("_seg4k_plain")
        # Under FSDP the class is a subclass of ours: it stays, and without a state runs plainly.
        if plain is not None:
            module.__class__ = plain
    model.__dict__.pop(_APPLIED, None)


def applied_plan(model: nn.Module) -> AppliedPlan | None:
    """What was applied to a model last, or None."""
    return model.__dict__.get(_APPLIED)


@contextmanager
def activation_checkpointing(
    model: nn.Module, plan: Plan, *, audit: AuditMode = "first_step"
) -> Iterator[AppliedPlan]:
    """Apply a plan for a block, and put back what was applied before."""
    before = applied_plan(model)
    try:
        yield apply_activation_checkpointing(model, plan, audit=audit)
    finally:
        if before is None:
            remove_activation_checkpointing(model)
        else:
            apply_activation_checkpointing(model, before.plan, audit=before.audit)


def find(name: str, segments: Mapping[str, nn.Module]) -> list[nn.Module]:
    """The modules of a segment or run.

    Raises:
        UserError: there are none.
    """
    if name in segments:
        return [segments[name]]
    siblings = members(name)
    if len(siblings) < 2 or any(sibling not in segments for sibling in siblings):
        raise unknown_segment(name, list(segments))
    return [segments[sibling] for sibling in siblings]


def check_targets(targets: Mapping[str, list[nn.Module]]) -> None:
    """Raise a UserError for modules to which a plan cannot be applied."""
    owners: dict[int, str] = {}
    for name, modules in targets.items():
        for module in modules:
            if id(module) in owners:
                raise UserError(
                    f"activation_checkpointing: {owners[id(module)]} and {name} are one module of the model. "
                    "Name only one of them in the plan."
                )
            owners[id(module)] = name
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
                raise UserError(
                    f"activation_checkpointing: segment {name} is sharded by FSDP already. Apply activation "
                    "checkpointing first, then compile, then FSDP."
                )
            if "forward" in module.__dict__:
                raise UserError(
                    f"activation_checkpointing: the forward of segment {name} was replaced on the module itself, "
                    "which hides the one of its class. Replace it in a subclass, or keep the segment."
                )


def make_out_of_place(module: nn.Module) -> list[str]:
    """Switch off `inplace` in every module inside, and return their names."""
    names = [name for name, inner in module.named_modules() if getattr(inner, "inplace", False) is True]
    for name in names:
        module.get_submodule(name).inplace = False  # type: ignore[assignment]
    return names


def joined(prefix: str, name: str) -> str:
    """A dotted name from its parts, either of which may be empty."""
    return ".".join(part for part in (prefix, name) if part)


@cache
def segment_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a module's class whose forward recomputes."""

    class Segment(plain):  # type: ignore[misc, valid-type]
        _seg4k_plain = plain

        def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            state = self.__dict__.get(_STATE)
            if state is None or runs_plainly(self):
                return super().forward(*args, **kwargs)
            if torch.compiler.is_compiling():
                return compiled_segment(state, super().forward, args, kwargs)
            return run_segment(state, {state.name: self}, super().forward, args, kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
            return as_plain(super().__reduce_ex__(protocol), segment_class, plain)

    return disguised(Segment, plain)


@cache
def run_member_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a module's class that takes part in a run of siblings recomputed together.

    Called first, the first member runs all of them, hooks and all, under one checkpoint. The others, given what
    it returned, pass it on.
    """

    class RunMember(plain):  # type: ignore[misc, valid-type]
        _seg4k_plain = plain

        def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            found = self.__dict__.get(_RUN)
            if found is None:
                return super().__call__(*args, **kwargs)
            run: RunState = found[0]
            if self is not run.modules[0]:
                if run.handed_on is None:
                    return super().__call__(*args, **kwargs)
                return pass_on(run, self, args, kwargs)
            run.handed_on = None
            if runs_plainly(self):
                return super().__call__(*args, **kwargs)
            return run_siblings(run, args, kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
            return as_plain(super().__reduce_ex__(protocol), run_member_class, plain)

    return disguised(RunMember, plain)


def disguised(subclass: type[nn.Module], plain: type[nn.Module]) -> type[nn.Module]:
    """The subclass under the name of the class it stands for: prints, exports and errors show that one."""
    subclass.__name__, subclass.__qualname__ = plain.__name__, plain.__qualname__
    subclass.__module__, subclass.__doc__ = plain.__module__, plain.__doc__
    return subclass


def as_plain(reduced: Any, make: Any, plain: type[nn.Module]) -> Any:  # noqa: ANN401
    """What pickle is told, with the swapped class made anew on loading: it has no name to be found by."""
    function, arguments, *rest = reduced
    return (_rebuild, (make, plain, function, arguments[1:]), *rest)


def _rebuild(make: Any, plain: type[nn.Module], function: Any, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
    return function(make(plain), *arguments)


def run_siblings(run: RunState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Run all modules of a run, each on what the one before gave, under one checkpoint."""

    def chain(first: Any, *further: Any, **named: Any) -> Any:  # noqa: ANN401
        for module in run.modules:
            first = nn.Module.__call__(module, first, *further, **named)
        return first

    if not args or not isinstance(args[0], Tensor):
        raise inexact(
            run.segment.name,
            "blocks can be recomputed together only if each takes one tensor, its first argument, and gives one",
            "Use blocks_per_segment=1",
        )
    names = members(run.segment.name)
    result = run_segment(run.segment, dict(zip(names, run.modules, strict=True)), chain, args, kwargs)
    run.handed_on = (weakref.ref(result), args[1:], kwargs)
    return result


def pass_on(run: RunState, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the argument, which is the run's result, if the model called the member as the run did.

    Raises:
        ActivationCheckpointingError: the model does something between the blocks, or calls them differently.
    """
    assert run.handed_on is not None
    result, further, named = run.handed_on
    if module is run.modules[-1]:
        run.handed_on = None
    same = (
        len(args) == 1 + len(further)
        and args[0] is result()
        and all(map(is_same, args[1:], further))
        and kwargs.keys() == named.keys()
        and all(is_same(kwargs[name], named[name]) for name in named)
    )
    if not same:
        run.handed_on = None
        raise inexact(
            run.segment.name,
            "the model does not call these blocks one after the other, each on the unchanged result of the one "
            "before and with the same further arguments",
            "Use blocks_per_segment=1",
        )
    return args[0]


def is_same(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether two arguments are the same tensor, or equal values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return bool(one == other)
