"""How much of a model lies in one region: a layer, a block, several blocks, or all of them.

Names do not tell: Hugging Face's `encoder.layer.3` is a whole transformer block, and a block of one library
is a stage of another. So blocks are found by structure: numbered members of a container whose class occurs
more than once, with at least two layers with weights in each, and no other blocks inside.
"""

import re
from collections.abc import Iterable
from typing import Literal

from torch import nn

Granularity = Literal["layer", "block", "blocks", "model", "other"]
"""`layer`: a part of one block. `block`: one block. `blocks`: several together, such as a stage. `model`: all
blocks of the model. `other`: what neither holds blocks nor lies in one, such as a stem."""

WRAPPED = "_checkpoint_wrapped_module"
"""What torch's CheckpointWrapper puts into the names of modules."""


def plain_name(name: str) -> str:
    """A module's name without the parts that torch's CheckpointWrapper adds."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def lies_in(name: str, other: str) -> bool:
    """Whether the module `name` is `other` or lies inside it; the whole model has the empty name."""
    return not other or name == other or name.startswith(f"{other}.")


def class_name(module: nn.Module) -> str:
    """The name of a module's class; that of the wrapped one for torch's CheckpointWrapper."""
    inner = module._modules.get(WRAPPED)
    return class_name(inner) if inner is not None else type(module).__qualname__


def blocks_of(model: nn.Module) -> list[str]:
    """The names of a model's blocks, in order of registration."""
    modules = {plain_name(name): module for name, module in reversed(list(model.named_modules()))}
    modules = dict(reversed(list(modules.items())))
    by_class: dict[str, list[str]] = {}
    for name in modules:
        parent, _, last = name.rpartition(".")
        numbered = bool(re.search(r"\d$", last))
        if numbered and isinstance(modules.get(parent), nn.ModuleList | nn.Sequential | nn.ModuleDict):
            by_class.setdefault(class_name(modules[name]), []).append(name)
    found = {
        name
        for names in by_class.values()
        if len(names) > 1 and all(_layers_with_weights(modules[name]) > 1 for name in names)
        for name in names
    }
    innermost = found - {parent for name in found for parent in _parents(name)}
    return [name for name in modules if name in innermost]


def granularity_of(modules: Iterable[str], blocks: Iterable[str]) -> Granularity:
    """How much of a model with these blocks the modules of one region hold."""
    modules, blocks = list(modules), list(blocks)
    inside = [block for block in blocks if any(lies_in(block, module) for module in modules)]
    if len(inside) == len(blocks) > 1:
        return "model"
    if inside:
        return "block" if len(inside) == 1 else "blocks"
    in_one = modules and all(any(lies_in(module, block) for block in blocks) for module in modules)
    return "layer" if in_one else "other"


def _layers_with_weights(module: nn.Module) -> int:
    return sum(any(True for _ in part.parameters(recurse=False)) for part in module.modules())


def _parents(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))
