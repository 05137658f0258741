"""Applying a plan to a model from outside, and taking it off again.

No module is wrapped and none is replaced: the class of a segment's module is swapped for a subclass of it
whose `forward` recomputes. Names of parameters and buffers, and so weights files, are the same under every
plan, and what is put on top (hooks, DDP, FSDP2) works as on the plain model. Put things on in this order:
activation checkpointing, then compile, then DDP or FSDP.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from seg4k.activation_checkpointing.plan import Plan
from seg4k.activation_checkpointing.runs import Membership, RunState
from seg4k.activation_checkpointing.segment_call import AUDITS, AuditMode, SegmentState
from seg4k.activation_checkpointing.segments import members, name_segments, segments_of, unknown_segment
from seg4k.activation_checkpointing.swap import swap_in_member, swap_in_segment, swap_out
from seg4k.activation_checkpointing.watching import is_sharded
from seg4k.errors import UserError

logger = logging.getLogger(__name__)

_APPLIED = "_seg4k_activation_checkpointing"
_said: WeakKeyDictionary[nn.Module, set[tuple[str, ...]]] = WeakKeyDictionary()
"""What was logged of each model's in-place modules."""


@dataclass(frozen=True)
class AppliedPlan:
    """What `apply_activation_checkpointing` did to a model."""

    plan: Plan
    audit: AuditMode
    recomputed: tuple[str, ...]
    """Segments and runs whose activations are recomputed."""
    made_out_of_place: tuple[str, ...]
    """In-place modules, by their name in the model, that run out of place until the plan is taken off."""


def apply_activation_checkpointing(
    model: nn.Module,
    plan: Plan,
    *,
    audit: AuditMode = "first_step",
    segments: Mapping[str, nn.Module] | None = None,
) -> AppliedPlan:
    """Recompute the segments of a model as a plan says.

    Applying a plan takes off the one before. In-place modules inside recomputed segments
    (`ReLU(inplace=True)`) run out of place from here on, since what they overwrite may be a segment's input.

    A segment recomputes in training with gradients. In eval mode, without gradients, in an export, and where
    no gradient will reach it (a frozen encoder), it runs plainly and keeps what it would keep without a plan.

    Args:
        model: has `segments()`, see `segments_of`; any other one together with `segments`.
        plan: see `make_plan`.
        audit: watch every operation of each segment in the first step (`first_step`), in each (`always`) or
            in none (`off`); see the module `audit`. The cheap guard, see `guards`, is always on.
        segments: the parts of somebody's own model, by name in forward order, as `name_segments` takes them;
            the model keeps them.

    Raises:
        UserError: `segments` holds what is no part of the model; the plan names what is no segment; one
            module is two of the plan's segments; a segment's forward was replaced on the module itself; FSDP
            was put on first.
    """
    if audit not in AUDITS:
        raise UserError(f"activation_checkpointing.audit={audit}: choose one of {', '.join(AUDITS)}")
    if segments is not None:
        name_segments(model, segments)
    known = segments_of(model)
    targets = {name: _find(name, known) for name in plan.recomputed()}
    _check(targets)
    remove_activation_checkpointing(model)
    switched: list[str] = []
    by_segment: Counter[str] = Counter()
    full_names = {id(module): name for name, module in model.named_modules()}
    for name, modules in targets.items():
        state = SegmentState(name, plan[name], audit)
        run = RunState(state, tuple(modules))
        for position, module in enumerate(modules):
            if len(modules) == 1:
                swap_in_segment(module, state)
            else:
                swap_in_member(module, Membership(run, position))
            for inner_name, inner in module.named_modules():
                if getattr(inner, "inplace", False) is True:
                    _set_inplace(inner, False)
                    switched.append(full_names.get(id(inner), f"{name}.{inner_name}"))
                    by_segment[name] += 1
    # Once: a model whose plans alternate, to be timed, would say it at every turn.
    if switched and tuple(switched) not in _said.setdefault(model, set()):
        _said[model].add(tuple(switched))
        logger.info(
            "made %d in-place modules out-of-place, which lie inside recomputed segments: %s",
            len(switched),
            ", ".join(f"{count} in {name}" for name, count in by_segment.items()),
        )
    applied = AppliedPlan(plan, audit, tuple(targets), tuple(switched))
    model.__dict__[_APPLIED] = applied
    return applied


def remove_activation_checkpointing(model: nn.Module) -> None:
    """Take a plan off again: classes and `inplace` flags are as they were before it."""
    for module in model.modules():
        swap_out(module)
        if _WAS_INPLACE in module.__dict__:
            _set_inplace(module, True)
    model.__dict__.pop(_APPLIED, None)


def applied_plan(model: nn.Module) -> AppliedPlan | None:
    """What was applied to a model last, or None."""
    applied: AppliedPlan | None = model.__dict__.get(_APPLIED)
    return applied


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


_WAS_INPLACE = "_seg4k_was_inplace"


def _set_inplace(module: nn.Module, inplace: bool) -> None:
    if inplace:
        module.__dict__.pop(_WAS_INPLACE)
    else:
        module.__dict__[_WAS_INPLACE] = True
    module.__dict__["inplace"] = inplace


def _find(name: str, segments: Mapping[str, nn.Module]) -> list[nn.Module]:
    if name in segments:
        return [segments[name]]
    siblings = members(name)
    if len(siblings) < 2 or any(sibling not in segments for sibling in siblings):
        raise unknown_segment(name, list(segments))
    return [segments[sibling] for sibling in siblings]


def _check(targets: Mapping[str, list[nn.Module]]) -> None:
    owners: dict[int, str] = {}
    for name, modules in targets.items():
        for module in modules:
            if id(module) in owners:
                raise UserError(
                    f"activation_checkpointing: {owners[id(module)]} and {name} are one module of the model. "
                    "Name only one of them in the plan."
                )
            owners[id(module)] = name
            if is_sharded(module):
                raise UserError(
                    f"activation_checkpointing: segment {name} is sharded by FSDP already. Apply activation "
                    "checkpointing first, then compile, then FSDP."
                )
            if "forward" in module.__dict__:
                raise UserError(
                    f"activation_checkpointing: the forward of segment {name} was replaced on the module "
                    "itself, which hides that of its class. Replace it in a subclass, or keep the segment."
                )
