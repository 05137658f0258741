"""DataLoaders that give batches as training expects them, and one that resumes in mid-epoch."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader

from seg4k.data.samples import CropDataset, Sample, TileDataset
from seg4k.data.sampling import EpochSampler, EverySampleSampler
from seg4k.data.unreadable import Reading
from seg4k.data.worker import start
from seg4k.errors import UserError

Batch = dict[str, Any]
"""`image` uint8 or float32 (B, C, H, W), `mask` int64 (B, H, W), `name` list of str."""


class BatchLoader(DataLoader[Sample]):
    """Batches of samples; a fault in a worker raises the error of the sample, which names the file."""

    def __init__(
        self,
        dataset: CropDataset | TileDataset,
        sampler: EpochSampler | EverySampleSampler,
        *,
        batch_size: int,
        num_workers: int,
        drop_last: bool,
    ) -> None:
        self._reading = Reading(num_workers) if num_workers else None
        dataset.reading = self._reading
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            drop_last=drop_last,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=num_workers > 0,
            worker_init_fn=start,
            multiprocessing_context=_context() if num_workers > 0 else None,
        )

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch names its own private class
        return self._batches(super().__iter__())

    def _batches(self, batches: Iterator[Any]) -> Iterator[Batch]:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except UserError as error:
                raise _plain(error) from None
            except RuntimeError as error:
                if (what := self._killed(batches)) is not None:
                    raise RuntimeError(what) from error
                raise
            # Masks travel from the workers with a byte per pixel: int64 is eight times the shared memory.
            small = batch["mask"]
            mask = torch.empty(small.shape, dtype=torch.int64, pin_memory=small.is_pinned())
            batch["mask"] = mask.copy_(small)
            yield batch

    def _killed(self, batches: Iterator[Any]) -> str | None:
        """What is known of a worker that was killed, None where none was."""
        for number, worker in enumerate(getattr(batches, "_workers", ())):
            if worker.exitcode and self._reading is not None:
                file = self._reading.of(number) or "nothing in particular"
                return (
                    f"a process that reads images ended with status {worker.exitcode} while it read {file}: "
                    "the file may be damaged, or memory is short (data.num_workers=0 needs least)"
                )
        return None


class ResumableLoader(BatchLoader):
    """Training batches; its state is the place in the epoch after the batches that were given out.

    Lightning keeps this state in its checkpoints; it is exact for those written at the end of a batch.
    """

    def __init__(
        self, dataset: CropDataset, sampler: EpochSampler, *, batch_size: int, num_workers: int
    ) -> None:
        super().__init__(dataset, sampler, batch_size=batch_size, num_workers=num_workers, drop_last=True)
        self._places = sampler
        self._step = batch_size * sampler.world
        self._state = sampler.state_dict()

    def state_dict(self) -> dict[str, int]:
        """The epoch and the samples of it that were given out, over all processes."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration at `state`."""
        self._places.load_state_dict(state)
        self._state = dict(state)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        places = self._places.state_dict()
        return self._from(places, super().__iter__())

    def _from(self, places: dict[str, int], batches: Iterator[Batch]) -> Iterator[Batch]:
        if places != self._places.state_dict():
            # Lightning makes the first iterator before it sets the epoch, and the workers have begun.
            places = self._places.state_dict()
            batches = super().__iter__()
        self._state = places
        for batch in batches:
            self._state = {"epoch": places["epoch"], "start_sample": self._state["start_sample"] + self._step}
            yield batch
        self._places.start_sample = 0


def _context() -> BaseContext:
    """Workers are forked from a server that has only imported what they need, not from this process.

    A fork of a process whose threads hold locks, as those of backward passes do, may wait for them for ever.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", start.__module__])
    return context


def _plain(error: UserError) -> UserError:
    """The error as the sample raised it: torch wraps those of workers in a copy of the traceback."""
    text, kind = str(error), type(error)
    marker = f"{kind.__module__}.{kind.__qualname__}: "
    return kind(text.rpartition(marker)[2].strip()) if marker in text else error
