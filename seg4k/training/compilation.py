"""torch.compile by regions: small graphs, of which equal ones are compiled once."""

from collections.abc import Mapping

import torch
import torch._dynamo
from torch import nn

from seg4k.activation_checkpointing import AppliedPlan
from seg4k.models.vit_unet import ViTUNet

# Graphs that one function may have before torch gives up compiling it. Every recomputed segment runs through
# the same one, and each needs a graph for training, one for validation and one for each image size.
GRAPHS = 128


def compile_segments(model: ViTUNet, applied: AppliedPlan) -> list[str]:
    """Compile the segments of a model in place, after activation checkpointing and before sharding.

    A region is what is recomputed as one, or each ViT block where its stage is not, and each neck level and
    decoder block: so twelve equal blocks are compiled once. Names of parameters stay. The head stays as it
    is, since the loss calls it strip by strip.

    Args:
        model: the segmenter.
        applied: the plan that was applied to it.

    Returns:
        The names of the regions.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    found = regions(model.segments(), applied)
    for module in found.values():
        module.compile()
    return list(found)


def regions(segments: Mapping[str, nn.Module], applied: AppliedPlan) -> dict[str, nn.Module]:
    """The segments to compile, each as one: none lies in another, together all but the head."""
    chosen: dict[str, nn.Module] = {}
    for name, module in segments.items():
        if name == "head" or any(name.startswith(f"{other}.") for other in chosen):
            continue
        blocks = any(other.startswith(f"{name}.block") for other in segments)
        if not blocks or name in applied.recomputed:
            chosen[name] = module
    return chosen
