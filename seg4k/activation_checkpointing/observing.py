"""Seeing a model's calls of `torch.utils.checkpoint.checkpoint`, whoever makes them.

A profiling function sees the function itself called: by torch's own wrapper, timm, transformers, seg4k, or a
user's code that imported it by name. Hooks on all modules tell what runs inside.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint as torch_checkpoint

from seg4k.activation_checkpointing.segment_call import SegmentCall

# Since torch 2.14 the decorator form calls this one, past the function `checkpoint`.
_ENTRY = getattr(torch_checkpoint, "_checkpoint_impl", torch_checkpoint.checkpoint)
_CODE = inspect.unwrap(_ENTRY).__code__


@dataclass
class Region:
    """One call of `checkpoint`: what ran inside, and how."""

    function: Any
    caller: nn.Module | None
    """The innermost module that was running."""
    use_reentrant: bool
    selective: bool
    nested: bool
    modules: list[nn.Module] = field(default_factory=list)
    """The outermost modules called inside."""


def own_modules(region: Region) -> list[nn.Module]:
    """The modules that a region recomputes: those that its function names, or all that were called inside."""
    function = region.function
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, SegmentCall):
        return list(function.modules.values())
    holder = region.caller
    if len(region.modules) != 1 and holder is not None and _covers(region.modules, holder):
        return [holder]
    return region.modules or ([holder] if holder is not None else [])


def _covers(parts: list[nn.Module], whole: nn.Module) -> bool:
    """Whether every layer with weights of `whole`, beside its own, lies in one of the parts."""
    inside = {id(module) for part in parts for module in part.modules()}
    return all(
        id(module) in inside
        for module in whole.modules()
        if module is not whole and any(True for _ in module.parameters(recurse=False))
    )


@contextmanager
def watched() -> Iterator[list[Region]]:
    """Record every region that the block enters, in order.

    What another profiling function was set before sees nothing meanwhile.
    """
    regions: list[Region] = []
    running: list[nn.Module] = []  # modules whose forward runs, from the outermost on
    open_regions: list[tuple[FrameType, Region, int]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is not _CODE:
            return
        if event == "call" and frame.f_locals.get("function") is not None:
            region = _begin(frame, running[-1] if running else None, nested=bool(open_regions))
            regions.append(region)
            open_regions.append((frame, region, len(running)))
        elif event == "return" and open_regions and open_regions[-1][0] is frame:
            open_regions.pop()

    def enter(module: nn.Module, *_: object) -> None:
        for _frame, holding, depth in open_regions:
            if len(running) == depth:
                holding.modules.append(module)
        running.append(module)

    def leave(*_: object) -> None:
        if running:
            running.pop()

    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(enter).remove)
        stack.callback(register_module_forward_hook(leave, always_call=True).remove)
        stack.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(profile)
        yield regions


def _begin(frame: FrameType, caller: nn.Module | None, nested: bool) -> Region:
    values = frame.f_locals
    reentrant = values.get("use_reentrant")
    contexts = values.get("context_fn", torch_checkpoint.noop_context_fn)
    return Region(
        function=values["function"],
        caller=caller,
        use_reentrant=True if reentrant is None else bool(reentrant),
        selective=contexts is not torch_checkpoint.noop_context_fn,
        nested=nested,
    )


def run_once(model: nn.Module, inputs: tuple[Any, ...]) -> list[Region]:
    """The regions of one training forward pass; modes, buffers and the random state are as before it."""
    training = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    try:
        model.train()
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), watched() as regions:
            model(*inputs)
        return regions
    finally:
        for module, mode in training:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
