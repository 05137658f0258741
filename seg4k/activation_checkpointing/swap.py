"""Swapping the class of a segment's module for a subclass that recomputes, and back.

A wrapper would rename parameters, and a copy of a module with a patched `forward` would still call that of
the original. A subclass does neither: the module stays what it is, and all it needs is in its `__dict__`.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, cast

import torch
from torch import nn

from seg4k.activation_checkpointing.runs import Membership, call_member
from seg4k.activation_checkpointing.segment_call import (
    SegmentState,
    compiled_segment,
    run_segment,
    runs_plainly,
)

STATE = "_seg4k_segment"
RUN = "_seg4k_run"
_PLAIN = "_seg4k_plain"

ModuleClass = type[nn.Module]


def swap_in_segment(module: nn.Module, state: SegmentState) -> None:
    """Make a module recompute as a segment of its own."""
    module.__dict__[STATE] = state
    module.__class__ = segment_class(type(module))


def swap_in_member(module: nn.Module, membership: Membership) -> None:
    """Make a module recompute as a part of a run."""
    module.__dict__[RUN] = membership
    module.__class__ = member_class(type(module))


def swap_out(module: nn.Module) -> None:
    """Make a module what it was.

    Where FSDP was put on top, the class is a subclass of ours. It stays, and without a state runs plainly.
    """
    module.__dict__.pop(STATE, None)
    module.__dict__.pop(RUN, None)
    plain = type(module).__dict__.get(_PLAIN)
    if plain is not None:
        module.__class__ = plain


def _segment_class(plain: ModuleClass) -> ModuleClass:
    """The subclass of a module's class whose forward recomputes."""

    class Segment(plain):  # type: ignore[misc, valid-type]
        _seg4k_plain = plain

        @wraps(plain.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            state = self.__dict__.get(STATE)
            if state is None or runs_plainly(self):
                return super().forward(*args, **kwargs)
            if torch.compiler.is_compiling():
                return compiled_segment(state, self, super().forward, args, kwargs)
            return run_segment(state, {state.name: self}, super().forward, args, kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
            return _reduced(super().__reduce_ex__(protocol), segment_class, plain)

    return _disguised(Segment, plain)


def _member_class(plain: ModuleClass) -> ModuleClass:
    """The subclass of a module's class that takes part in a run."""

    class Member(plain):  # type: ignore[misc, valid-type]
        _seg4k_plain = plain

        def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            membership = self.__dict__.get(RUN)
            if membership is None:
                return super().__call__(*args, **kwargs)
            return call_member(membership, self, super().__call__, args, kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
            return _reduced(super().__reduce_ex__(protocol), member_class, plain)

    return _disguised(Member, plain)


# One subclass per class, so that compiled code and pickles of two models agree on it.
segment_class = cast(Callable[[ModuleClass], ModuleClass], cache(_segment_class))
member_class = cast(Callable[[ModuleClass], ModuleClass], cache(_member_class))


def _disguised(subclass: ModuleClass, plain: ModuleClass) -> ModuleClass:
    """The subclass under the name of the class it stands for, as prints, exports and errors show it."""
    subclass.__name__, subclass.__qualname__ = plain.__name__, plain.__qualname__
    subclass.__module__, subclass.__doc__ = plain.__module__, plain.__doc__
    return subclass


def _reduced(reduced: Any, make: Any, plain: ModuleClass) -> Any:  # noqa: ANN401
    """What pickle is told: it cannot find our class by name, so that loading makes it anew."""
    function, arguments, *rest = reduced
    return (_rebuild, (make is segment_class, plain, function, arguments[1:]), *rest)


def _rebuild(segment: bool, plain: ModuleClass, function: Any, arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
    return function((segment_class if segment else member_class)(plain), *arguments)
