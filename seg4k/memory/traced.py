"""What a trace finds: the memory and the work of one training step."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from seg4k.memory.recorder import Operation

__all__ = ["KINDS", "STATIC", "Argument", "Held", "Segment", "Trace", "around", "outermost_of"]

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "inputs",
    "activations",
    "temporaries",
    "gathered",  # parameters, from the other devices
    "library",
)

STATIC = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Argument:
    """A tensor that a segment takes, by its looks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, value: object) -> object:
        """The looks of a tensor; anything else as it is."""
        if isinstance(value, torch.Tensor):
            return cls(tuple(value.shape), value.dtype, value.requires_grad)
        return value


@dataclass
class Segment:
    """What one segment costs in a step, segments inside it included.

    Attributes:
        saved_bytes: born in its forward and alive when backward begins.
        work: per phase ("forward", "recompute", "backward") how often each amount of work is done.
        peaks: per phase the most bytes alive meanwhile, anywhere.
        own_peaks: the same while no segment inside it runs.
        moved: per phase the bytes that it, and no segment inside it, moves between device and host.
    """

    saved_bytes: int = 0
    work: dict[str, Counter[Operation]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    own_peaks: dict[str, int] = field(default_factory=dict)
    moved: Counter[str] = field(default_factory=Counter)

    def flops(self, phase: str) -> int:
        """FLOPs of a phase."""
        return sum(operation.flops * times for operation, times in self.work.get(phase, Counter()).items())


@dataclass
class Held:
    """Who holds what from forward to backward; made on request, for planning.

    Attributes:
        bytes: of each storage, parameters and other permanent ones left out.
        born: the segment (the innermost) or other place of its birth.
        saved: per innermost segment or other place, the storages that autograd saved for it.
        inputs: per segment, the storages of its positional arguments.
        fixed_inputs: those of them that offloading leaves where they are.
        attention: per innermost segment, the storages that its attention made.
        arguments: per segment its positional arguments, tensors as `Argument`.
    """

    bytes: list[int]
    born: list[str]
    saved: dict[str, set[int]]
    inputs: dict[str, set[int]]
    fixed_inputs: dict[str, set[int]]
    attention: dict[str, set[int]]
    arguments: dict[str, tuple[object, ...]]


@dataclass
class Trace:
    """The memory and work of one training step.

    Attributes:
        peak_bytes: the most bytes held by tensors at one time.
        peak_at: the outermost segment and the phase, as "decoder.block3 backward".
        peak_kinds: what the peak is made of, by `KINDS`; sums up to `peak_bytes`.
        static_kinds: what outlives a step, by `STATIC`: parameters with buffers and copies of the weights,
            gradients, and the optimizer's state, whichever step it comes into being in.
        segments: by name, nested ones too, in forward order; and "input", "loss", "optimizer" for the rest.
        live: bytes alive over the step, thinned to its outline.
        marks: (index into `live`, outermost segment or other place, phase) where each begins.
        held: see `Held`; None unless asked for.
    """

    peak_bytes: int
    peak_at: str
    peak_kinds: dict[str, int]
    static_kinds: dict[str, int]
    segments: dict[str, Segment]
    live: list[int]
    marks: list[tuple[int, str, str]]
    held: Held | None = None

    @property
    def static_bytes(self) -> int:
        """Parameters, buffers, gradients, optimizer state and copies of the weights."""
        return sum(self.static_kinds.values())

    def flops(self, phase: str | None = None) -> int:
        """FLOPs of one batch, forward and backward; or those of one phase."""
        phases = ("forward", "recompute", "backward") if phase is None else (phase,)
        return sum(self.segments[name].flops(which) for name in self.outermost() for which in phases)

    def outermost(self) -> list[str]:
        """The segments and other places that lie in no other."""
        return [name for name in self.segments if outermost_of(name, self.segments) == name]


def outermost_of(name: str, names: Mapping[str, object]) -> str:
    """The outermost segment around `name`, itself where there is none."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        if (prefix := ".".join(parts[:end])) in names:
            return prefix
    return name


def around(name: str, names: Mapping[str, object]) -> Iterator[str]:
    """The segments that hold `name`, itself included."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        if (prefix := ".".join(parts[:end])) in names:
            yield prefix
