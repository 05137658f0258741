"""Tensor operations of our own, hidden from whoever watches the model's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unwatched() -> Iterator[None]:
    """Run the operations of the block past every mode in force, without gradients.

    Selective checkpointing counts a segment's operations to find what it kept, FLOP counters and tracers add
    them up: what the guards do beside them must not show.
    """
    with _disable_current_modes(), torch.no_grad():
        yield
