"""What is random inside the model: dropout, drop path and whatever a segment of one's own draws."""

import random

import numpy as np
import torch


def seed_micro_batch(seed: int, step: int, part: int, rank: int) -> None:
    """Seed the generators of torch (all devices), numpy and Python for one micro-batch.

    What is drawn then follows from these four numbers alone. A resumed run draws what the unbroken one would
    have drawn, with no generator's state to keep; whatever else draws in between (a data loader, a
    validation, a logger) has no part in it.

    Args:
        seed: of the run.
        step: optimizer steps done before it.
        part: micro-batches of the same step done before it.
        rank: of the process; each has samples of its own, and so draws of its own.
    """
    # Five numbers, so that no other use of `seed` in this package shares the sequence.
    words = np.random.SeedSequence((4, seed, step, part, rank)).generate_state(3, np.uint64)
    torch.manual_seed(int(words[0]) >> 1)
    random.seed(int(words[1]))
    np.random.seed(int(words[2]) >> 32)
