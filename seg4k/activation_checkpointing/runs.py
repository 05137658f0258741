"""Runs: consecutive siblings recomputed together, from outside a model that calls them one by one.

The first module of a run, when it is called, runs all of them under one checkpoint. The model then calls the
others with what it got; they see that it is the run's result and pass it on.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seg4k.activation_checkpointing.errors import inexact
from seg4k.activation_checkpointing.segment_call import (
    SegmentState,
    compiled_segment,
    run_segment,
    runs_plainly,
)
from seg4k.activation_checkpointing.segments import members


@dataclass
class RunState:
    """What the modules of a run share."""

    segment: SegmentState
    modules: tuple[nn.Module, ...]
    handed_on: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False)
    """A weak reference to what the first gave, and its further arguments, until the last has passed it on."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handed_on": None}


@dataclass
class Membership:
    """A module's place in a run."""

    run: RunState
    position: int


def call_member(
    membership: Membership,
    module: nn.Module,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401
    """What calling a module of a run does in place of `call`, its own `__call__`."""
    run = membership.run
    if membership.position > 0:
        if run.handed_on is None:
            return call(*args, **kwargs)
        return pass_on(run, membership.position, args, kwargs)
    if run.handed_on is not None:  # left by a forward pass that failed in between
        run.handed_on = None
    if runs_plainly(module):
        return call(*args, **kwargs)
    return run_together(run, args, kwargs)


def run_together(run: RunState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Run all modules of a run, hooks and all, each on what the one before gave, under one checkpoint."""

    def chain(first: Any, *further: Any, **named: Any) -> Any:  # noqa: ANN401
        for module in run.modules:
            first = nn.Module.__call__(module, first, *further, **named)
        return first

    if not args or not isinstance(args[0], Tensor):
        raise inexact(
            run.segment.name,
            "blocks can be recomputed together only if each takes one tensor first and gives one",
            "Use blocks_per_segment=1",
        )
    modules = dict(zip(members(run.segment.name), run.modules, strict=True))
    if torch.compiler.is_compiling():
        result = compiled_segment(run.segment, modules, chain, args, kwargs)
        run.handed_on = (result, args[1:], kwargs)
        return result
    result = run_segment(run.segment, modules, chain, args, kwargs)
    run.handed_on = (weakref.ref(result), args[1:], kwargs)
    return result


def pass_on(run: RunState, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the argument, which is the run's result, if the model called the member as the run did.

    Raises:
        ActivationCheckpointingError: the model does something between the blocks, or calls them differently.
    """
    assert run.handed_on is not None
    given, further, named = run.handed_on
    result = given if isinstance(given, Tensor) else given()
    if position == len(run.modules) - 1:
        run.handed_on = None
    same = (
        len(args) == 1 + len(further)
        and args[0] is result
        and all(is_same(one, other) for one, other in zip(args[1:], further, strict=True))
        and kwargs.keys() == named.keys()
        and all(is_same(kwargs[name], named[name]) for name in named)
    )
    if not same:
        run.handed_on = None
        raise inexact(
            run.segment.name,
            "the model does not call these blocks one after the other, each on the unchanged result of the "
            "one before and with the same further arguments",
            "Use blocks_per_segment=1",
        )
    return args[0]


def is_same(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether two arguments are the same tensor, or equal values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return bool(one == other)
