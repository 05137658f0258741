"""Which samples an epoch has, in which order, on which process; and the randomness of one sample.

Everything follows from (seed, epoch, index): neither workers nor processes nor a resumed run change a sample.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from seg4k.errors import UserError

Key = tuple[int, int]
"""(epoch, index): what a sampler yields and a dataset is asked for."""

PADDING = -1
"""The index of a sample that is all ignored and only keeps processes in step."""

# numpy pads short seeds with zeros, so (1, 2) and (1, 2, 0) are the same: each use has its own first number.
_ORDER, _SAMPLE, _TURN = 1, 2, 3


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random generator of one sample."""
    return np.random.default_rng((_SAMPLE, seed, epoch, index))


def epoch_order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of an epoch: each of `count` indices once, (count,)."""
    return np.random.default_rng((_ORDER, seed, epoch)).permutation(count)


def scene_order(seed: int, epoch: int, turn: int, count: int) -> NDArray[np.int64]:
    """The scenes in the order of one turn of an epoch, in which each has one crop, (count,)."""
    return np.random.default_rng((_TURN, seed, epoch, turn)).permutation(count)


class EpochSampler(Sampler[Key]):
    """Keys (epoch, index) of one process: positions rank, rank + world, ... of the epoch's order.

    All processes get equally many; the samples left over at the end of an epoch are dropped, others in each
    epoch. Step s of `world` processes with b samples each takes the positions from s * b * world to
    (s + 1) * b * world of the order, just as one process with b * world samples does.

    Args:
        count: samples of an epoch, over all processes.
        seed: seed of the run.
        rank: number of this process.
        world: number of processes.
        multiple: the epoch is cut to a multiple of this (samples of one optimizer step over all processes),
            so that every shape of the same run sees the same samples.

    Raises:
        UserError: where an epoch has fewer samples than `multiple`.
    """

    def __init__(self, count: int, *, seed: int, rank: int = 0, world: int = 1, multiple: int = 1) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside 0..{world - 1}")
        multiple = math.lcm(multiple, world)
        self.total = count // multiple * multiple
        if self.total == 0:
            raise UserError(
                f"An epoch has {count} samples, fewer than the {multiple} of one optimizer step; set "
                f"data.samples_per_epoch to at least {multiple}, or make the batch smaller."
            )
        self.count = count
        self.seed = seed
        self.rank = rank
        self.world = world
        self.epoch = 0
        self.start_sample = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a new epoch starts at its first sample."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.start_sample = 0

    def state_dict(self) -> dict[str, int]:
        """Where the next iteration starts: epoch, and samples of it already seen, over all processes."""
        return {"epoch": self.epoch, "start_sample": self.start_sample}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Start the next iteration where `state` says."""
        self.epoch = state["epoch"]
        self.start_sample = state["start_sample"]

    def __len__(self) -> int:
        """Samples of a whole epoch on this process, wherever the next iteration starts."""
        return self.total // self.world

    def __iter__(self) -> Iterator[Key]:
        # The order covers all samples and is cut afterwards, so that no sample is left out in every epoch.
        order = epoch_order(self.seed, self.epoch, self.count)[: self.total]
        epoch = self.epoch
        for index in order[self.start_sample + self.rank :: self.world]:
            yield epoch, int(index)


class EverySampleSampler(Sampler[Key]):
    """Keys (0, index) of one process for validation: every sample exactly once over all processes.

    A process takes a run of neighbours (tiles of one image are then decoded by one process). Processes whose
    run is shorter end with `PADDING` keys, so that all take equally many steps, which sharded models need.
    """

    def __init__(self, count: int, *, rank: int = 0, world: int = 1) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is outside 0..{world - 1}")
        self.count = count
        self.rank = rank
        self.each = -(-count // world)

    def __len__(self) -> int:
        return self.each

    def __iter__(self) -> Iterator[Key]:
        first = self.rank * self.each
        for index in range(first, first + self.each):
            yield 0, (index if index < self.count else PADDING)
