"""Files that cannot be read: left out and named (`data.on_error=skip`), or named where they end a worker."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.utils.data import get_worker_info

from seg4k.data.scenes import Scene
from seg4k.errors import UserError

logger = logging.getLogger(__name__)

Thing = TypeVar("Thing")
Content = TypeVar("Content")

_named: set[str] = set()


def name_once(error: UserError) -> None:
    """Warn that a file is left out, the first time that it is met in this process."""
    if str(error) not in _named:
        _named.add(str(error))
        logger.warning("left out, since data.on_error=skip: %s", error)


def first_readable(things: Iterable[Thing], read: Callable[[Thing], Content], *, skip: bool) -> Content:
    """What `read` returns for the first thing that it can read; for the first of all where `skip` is false.

    Raises:
        UserError: the error of the last, where none can be read.
    """
    last: UserError | None = None
    for thing in things:
        try:
            return read(thing)
        except UserError as error:
            if not skip:
                raise
            name_once(error)
            last = error
    assert last is not None
    raise last


class Reading:
    """What each worker of a loader reads, in memory that they share with the process that started them.

    A worker that is killed (by a decoder's fault, or for its memory) leaves no other word of it.

    Args:
        workers: how many there are.
    """

    _LONGEST = 1024

    def __init__(self, workers: int) -> None:
        texts = torch.zeros(workers, self._LONGEST, dtype=torch.uint8)
        self._texts: torch.Tensor = texts.share_memory_()  # type: ignore[no-untyped-call]

    def note(self, what: str) -> None:
        """Note in a worker what it begins to read; elsewhere do nothing."""
        worker = get_worker_info()
        if worker is not None:
            text = what.encode()[: self._LONGEST - 1] + b"\0"
            self._texts[worker.id, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def of(self, worker: int) -> str:
        """What a worker was reading; empty where it was between two samples."""
        return bytes(self._texts[worker].numpy()).split(b"\0", 1)[0].decode(errors="replace")


@contextmanager
def noted(reading: Reading | None, scene: Scene) -> Iterator[None]:
    """Note what is read while the block runs."""
    if reading is not None:
        reading.note(str(getattr(scene, "image_path", scene.name)))
    try:
        yield
    finally:
        if reading is not None:
            reading.note("")
