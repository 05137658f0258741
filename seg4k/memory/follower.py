"""Telling a recorder where a step is, by hooks on a model's segments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from seg4k.memory.recorder import Place, Recorder

__all__ = ["Follower"]

_FOLLOWED = "_seg4k_followed"


class Follower:
    """Tells a recorder where the step is.

    In forward by the segments' calls. In backward by the gradients of their outputs, which are complete when
    the backward of the segment begins; and by the calls that recomputation makes.
    """

    def __init__(self, recorder: Recorder, model: nn.Module, segments: dict[str, nn.Module]) -> None:
        self.recorder = recorder
        self.phase = "forward"
        self.entered: Callable[[str, tuple[Any, ...]], None] | None = None
        self._stack: list[str] = []
        self._outside = "input"
        self._handles = []
        for name, module in segments.items():
            # Before the hooks of FSDP, so that what is gathered for a segment counts as its own.
            self._handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self._handles.append(
                module.register_forward_hook(self._leave(name), prepend=True, always_call=True)
            )
        self._handles.append(model.register_forward_hook(self._after_model))

    def start(self, phase: str) -> None:
        """Enter a phase: "forward", "backward" or "optimizer"."""
        self.phase = phase
        self._stack.clear()
        self._outside = {"forward": "input", "backward": "loss"}.get(phase, phase)
        self.recorder.move(Place(self._outside, phase))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._stack.append(name)
            if self.phase == "forward" and self.entered is not None:
                self.entered(name, inputs)
            self.recorder.move(Place(name, self.phase))

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            if name in self._stack:  # recomputation may end in the midst of a segment
                del self._stack[self._stack.index(name) :]
            if self.phase == "forward":
                # Between segments, what comes next is their model's own code, or the loss.
                self._outside = "loss"
            here = self._stack[-1] if self._stack else self._outside
            if self.phase == "forward" or self._stack:
                self.recorder.move(Place(here, self.phase))
            if self.phase != "forward":
                return
            for tensor in tree_leaves(output):
                # The last segment inside returns the same tensor as the one around it: it comes first in
                # backward, and says more.
                traced = isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None
                if traced and not hasattr(tensor, _FOLLOWED):
                    setattr(tensor, _FOLLOWED, True)
                    tensor.register_hook(lambda _: self._reached(name))

        return hook

    def _reached(self, name: str) -> None:
        if self.phase == "backward":
            self._stack.clear()
            self.recorder.move(Place(name, "backward"))

    def _after_model(self, module: nn.Module, inputs: object, output: object) -> None:
        if self.phase == "forward":
            self._outside = "loss"
            self.recorder.move(Place("loss", "forward"))
