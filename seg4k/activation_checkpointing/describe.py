"""Which granularity of activation checkpointing is really in force, in any model.

    print(describe_checkpointing(model))                 # read from flags and wrappers, at once
    print(describe_checkpointing(model, image))          # seen in one forward pass

Libraries have a switch each, and the same switch means other things on other models: timm's
`set_grad_checkpointing` recomputes each block of a ViT, but each whole stage, first and last excepted, of a
model taken as `features_only`; Hugging Face's `gradient_checkpointing_enable` recomputes what it calls a
layer, which is a whole block. Torch only: what other libraries set is known by its attributes.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from seg4k.activation_checkpointing.apply import applied_plan
from seg4k.activation_checkpointing.granularity import (
    WRAPPED,
    Granularity,
    blocks_of,
    class_name,
    granularity_of,
    lies_in,
    plain_name,
)
from seg4k.activation_checkpointing.plan import Policy
from seg4k.activation_checkpointing.segments import members, segments_of

_SEVERAL = {
    "layer": "parts of blocks",
    "block": "blocks",
    "blocks": "groups of several blocks",
    "model": "regions around all blocks",
    "other": "others",
}

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")


@dataclass(frozen=True)
class CheckpointedRegion:
    """A part of a model that is recomputed as one.

    Attributes:
        modules: its outermost modules, by their names in the model.
        kinds: the names of their classes.
        granularity: how much of the model that is; see `granularity.Granularity`.
        by: who recomputes it: "seg4k", "CheckpointWrapper", "gradient_checkpointing", "grad_checkpointing",
            or "torch.utils.checkpoint" where it was seen and no switch names it.
        use_reentrant: torch's variant; None where it was not seen and no switch tells.
        selective: some results are kept.
        nested: it lies in another region.
        calls: how often it was entered in the forward pass; 0 where none was run.
    """

    modules: tuple[str, ...]
    kinds: tuple[str, ...]
    granularity: Granularity
    by: str
    use_reentrant: bool | None = None
    selective: bool = False
    nested: bool = False
    calls: int = 0


@dataclass(frozen=True)
class CheckpointingDescription:
    """What is recomputed in a model.

    Attributes:
        regions: in the order of the forward pass where it was run, else of registration.
        blocks: how many blocks the model has.
        observed: whether a forward pass was run.
        unread: modules whose switch is on, where it does not tell which parts it means.
        notes: what a reader should know besides.
    """

    regions: tuple[CheckpointedRegion, ...]
    blocks: int
    observed: bool
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[Granularity, int]:
        """How many regions there are of each granularity, the most frequent first."""
        return dict(Counter(region.granularity for region in self.regions).most_common())

    @property
    def granularity(self) -> Granularity | None:
        """That of most regions that hold blocks or parts of them; None where nothing is recomputed."""
        told = {kind: count for kind, count in self.counts.items() if kind != "other"} or self.counts
        return max(told, key=lambda kind: told[kind], default=None)

    def __str__(self) -> str:
        """A sentence, a line for each kind of region, and the notes."""
        if self.unread:
            count, first = len(self.unread), self.unread[0] or "the model"
            where = first if count == 1 else f"{first} and {count - 1} other modules"
            lines = [f"a switch is on in {where}; what it recomputes is seen in a forward pass only"]
        elif not self.regions:
            lines = ["nothing is recomputed"]
        else:
            parts = ", ".join(f"{count} {_SEVERAL[kind]}" for kind, count in self.counts.items())
            lines = [f"{len(self.regions)} regions are recomputed: {parts} (the model has {self.blocks})"]
            lines += [f"  {line}" for line in _grouped(self.regions)]
        how = "seen in a forward pass" if self.observed else "read from switches; give inputs to see it run"
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes), f"  ({how})"])


def describe_checkpointing(model: nn.Module, *inputs: Any) -> CheckpointingDescription:  # noqa: ANN401
    """Tell which regions of a model are recomputed, whoever switched that on.

    Args:
        model: any; with seg4k's plan, Hugging Face's `gradient_checkpointing_enable`, timm's
            `set_grad_checkpointing`, torch's `CheckpointWrapper`, or code that calls
            `torch.utils.checkpoint.checkpoint`.
        inputs: what the model takes. With them a training forward pass is run and its regions are seen;
            buffers, random state and modes of modules are put back. Without, switches are read: what a
            model's own code does about them is then not known.
    """
    blocks = blocks_of(model)
    static = list(_by_switch(model, blocks))
    notes = [] if model.training else ["the model is in eval mode: nothing is recomputed before train()"]
    if not inputs:
        unread = () if static else tuple(_switched_on(model))
        return CheckpointingDescription(tuple(static), len(blocks), False, unread, tuple(notes))
    regions = _seen(model, inputs, blocks, static)
    if static and not regions:
        notes.append(f"switched on for {len(static)} regions, and none was recomputed")
    if not static and not regions and (unread := tuple(_switched_on(model))):
        notes.append(f"switched on in {len(unread)} modules, and nothing was recomputed")
    if any(region.use_reentrant for region in regions):
        notes.append(
            "use_reentrant=True: a region none of whose inputs requires a gradient gives its weights none"
        )
    return CheckpointingDescription(tuple(regions), len(blocks), observed=True, notes=tuple(notes))


def _seen(
    model: nn.Module, inputs: tuple[Any, ...], blocks: Sequence[str], static: Sequence[CheckpointedRegion]
) -> list[CheckpointedRegion]:
    from seg4k.activation_checkpointing.observing import own_modules, run_once
    from seg4k.activation_checkpointing.segment_call import SegmentCall

    names = _names(model)
    switches = [(region.modules, region.by) for region in static]
    calls: Counter[CheckpointedRegion] = Counter()
    for region in run_once(model, inputs):
        modules = own_modules(region)
        found = _names_of(modules, names)
        if isinstance(region.function, SegmentCall):
            by = "seg4k"
        else:
            related = (
                by
                for others, by in switches
                if any(lies_in(n, o) or lies_in(o, n) for n in found for o in others)
            )
            by = next(related, "torch.utils.checkpoint")
        kinds = tuple(class_name(module) for module in modules)
        granularity = granularity_of(found, blocks)
        told = CheckpointedRegion(
            found, kinds, granularity, by, region.use_reentrant, region.selective, region.nested
        )
        calls[told] += 1
    return [CheckpointedRegion(**{**told.__dict__, "calls": count}) for told, count in calls.items()]


def _by_switch(model: nn.Module, blocks: Sequence[str]) -> Iterator[CheckpointedRegion]:
    """The regions that plans, wrappers and flags of a model ask for."""
    names = _names(model)
    modules = {name: module for name, module in model.named_modules()}

    def region(found: Sequence[nn.Module], by: str, **options: Any) -> CheckpointedRegion:  # noqa: ANN401
        told = _names_of(found, names)
        kinds = tuple(class_name(module) for module in found)
        return CheckpointedRegion(told, kinds, granularity_of(told, blocks), by, **options)

    applied = applied_plan(model)
    if applied is not None:
        segments = segments_of(model)
        for name in applied.recomputed:
            selective = applied.plan[name] is Policy.SELECTIVE
            parts = [segments[member] for member in members(name)]
            yield region(parts, "seg4k", use_reentrant=False, selective=selective)
    for name, module in modules.items():
        if WRAPPED in module._modules and hasattr(module, "checkpoint_fn"):
            options = module.checkpoint_fn.keywords if isinstance(module.checkpoint_fn, partial) else {}
            yield region([module], "CheckpointWrapper", use_reentrant=options.get("use_reentrant"))
        elif getattr(module, "gradient_checkpointing", False) is True:
            function = getattr(module, "_gradient_checkpointing_func", None)
            reentrant = getattr(function, "keywords", {}).get("use_reentrant")
            for part in _switched_by_transformers(module):
                yield region([part], "gradient_checkpointing", use_reentrant=reentrant)
        elif getattr(module, "grad_checkpointing", False) is True:
            for part in _switched_by_timm(plain_name(name), module, names, blocks):
                yield region([part], "grad_checkpointing")


def _switched_on(model: nn.Module) -> Iterator[str]:
    """The modules with a switch of timm or Hugging Face that is on."""
    for name, module in model.named_modules():
        if any(getattr(module, flag, False) is True for flag in _FLAGS):
            yield plain_name(name)


def _switched_by_transformers(module: nn.Module) -> list[nn.Module]:
    """A layer that recomputes itself, or else, of a module that loops over layers, those layers."""
    if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__):
        return [module]
    looped = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    parts = [part for child in looped for part in child]
    own = [hasattr(part, "gradient_checkpointing") for part in parts]
    return [part for part, has_own in zip(parts, own, strict=True) if not has_own]


def _switched_by_timm(
    name: str, module: nn.Module, names: dict[int, str], blocks: Sequence[str]
) -> list[nn.Module]:
    """The blocks below a module with the flag; of a `features_only` model the children but first and last."""
    if any(base.__name__ == "FeatureDictNet" for base in type(module).__mro__):
        inner = list(module.children())[1:-1]
        return [part for part in inner if getattr(part, "inplace", False) is not True]
    prefix = f"{name}." if name else ""
    by_name = {names[id(part)]: part for part in module.modules()}
    return [by_name[block] for block in blocks if block.startswith(prefix) and block in by_name]


def _names(model: nn.Module) -> dict[int, str]:
    return {id(module): plain_name(name) for name, module in model.named_modules()}


def _names_of(modules: Sequence[nn.Module], names: dict[int, str]) -> tuple[str, ...]:
    return tuple(names.get(id(module), "(not in the model)") for module in modules)


def _grouped(regions: Sequence[CheckpointedRegion]) -> list[str]:
    """One line for all regions that differ in numbers only."""
    groups: dict[tuple[str, ...], list[CheckpointedRegion]] = {}
    for region in regions:
        shape = re.sub(r"\d+", "#", " + ".join(region.modules))
        key = (shape, str(region.kinds), region.granularity, region.by, str(region.selective))
        groups.setdefault(key, []).append(region)
    lines = []
    for group in groups.values():
        first, last = group[0], group[-1]
        where = " + ".join(first.modules)
        if len(group) > 1:
            where += f" ... {' + '.join(last.modules)}"
        kinds = ", ".join(dict.fromkeys(first.kinds))
        how = [first.granularity, first.by]
        how += ["selective"] * first.selective + ["nested"] * first.nested
        if first.use_reentrant:
            how.append("use_reentrant=True")
        lines.append(f"{len(group)} x {kinds}: {where} ({', '.join(how)})")
    return lines
