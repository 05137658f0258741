"""Decoded images kept in files that are mapped into memory, shared by all processes that read them."""

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seg4k.errors import UserError
from seg4k.files import atomic_path, locked

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "seg4k-cache-"
_OLD_SECONDS = 3600
# Part of every key: raise it whenever the same file would be decoded otherwise.
_VERSION = 1


class ArrayCache:
    """Arrays in a folder of .npy files, at most `most_bytes` together, temporary files included.

    A key is the path of a file, its modification time and its size, so that a file that was changed is
    decoded anew. What does not fit is not kept, and nothing that is kept makes room for it: an epoch takes
    every image once, and to throw out the oldest would be to throw out what is needed next.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._full = False

    def array(self, source: Path, kind: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """What `make` makes of the file `source`, from the cache where it is there; not to be written to.

        Args:
            source: a file.
            kind: tells several arrays of one file apart.
            make: decodes; its errors are passed on.
        """
        try:
            status = source.stat()
        except OSError:
            return make()  # says what is wrong
        who = hashlib.sha256(f"{_VERSION}|{source.resolve()}|{kind}".encode()).hexdigest()[:32]
        path = self.folder / f"{who}-{status.st_mtime_ns}-{status.st_size}.npy"
        found = _load(path)
        if found is None:
            found = make()
            if not self._full:
                self._keep(path, who, found)
        return found

    def held_bytes(self) -> int:
        """Bytes of all files in the folder."""
        total = 0
        for entry in os.scandir(self.folder):
            try:
                total += entry.stat().st_size
            except FileNotFoundError:  # another process has just renamed or removed it
                continue
        return total

    def _keep(self, path: Path, who: str, made: NDArray[Any]) -> None:
        need = made.nbytes + 256  # the header of the file
        try:
            with atomic_path(path) as temporary:
                with locked(self.folder / ".lock"):
                    for stale in self.folder.glob(f"{who}-*.npy"):  # of the file before it was changed
                        stale.unlink(missing_ok=True)
                    if self.held_bytes() + need > self.most_bytes:
                        raise _FullError
                    os.truncate(temporary, need)  # so that other processes count it
                with temporary.open("rb+") as file:
                    np.lib.format.write_array(file, np.ascontiguousarray(made), allow_pickle=False)
                    file.truncate()
        except (_FullError, OSError):  # no room on the disk is no fault either
            self._full = True


class _FullError(Exception):
    pass


def open_cache(kind: str, most_bytes: int, folder: Path | None, root: Path) -> ArrayCache | None:
    """The cache that `data.cache` asks for.

    Args:
        kind: `none`; `ram`: in shared memory, gone with this process; `disk`: in a folder that stays.
        most_bytes: bound of the cache. Of shared memory no more than half of what is free is taken.
        folder: for `disk`; None takes ~/.cache/seg4k/images.
        root: the data set; each has a folder of its own.

    Raises:
        UserError: for a folder that cannot be written.
    """
    if kind == "none":
        return None
    if kind == "ram":
        return _in_memory(most_bytes)
    base = folder or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "seg4k" / "images"
    own = base / hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    try:
        own.mkdir(parents=True, exist_ok=True)
        for left in own.glob(".*.npy"):  # of processes that were killed while they wrote
            if time.time() - left.stat().st_mtime > _OLD_SECONDS:
                left.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"data.cache=disk cannot write to {own} ({error.strerror}); set data.cache_dir=FOLDER."
        ) from None
    return ArrayCache(own, most_bytes)


def _in_memory(most_bytes: int) -> ArrayCache:
    base = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    _remove_abandoned(base)
    # Processes of one machine share it, and so does what the workers hand over.
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    share = most_bytes // processes
    room = shutil.disk_usage(base).free // 2 // processes
    if room < share:
        print(
            f"data.cache=ram: {base} has room for {room / 2**30:.1f} GiB, not {share / 2**30:.1f}; what "
            "is beyond is decoded each time",
            file=sys.stderr,
        )
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    _hold(folder)
    return ArrayCache(folder, min(share, room))


def _hold(folder: Path) -> None:
    """Keep a lock as long as this process lives, and remove the folder when it ends."""
    file = (folder / ".alive").open("a")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):
        pass
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a forked worker
            shutil.rmtree(folder, ignore_errors=True)
            file.close()

    atexit.register(remove)


def _remove_abandoned(base: Path) -> None:
    """Remove what killed processes have left: the lock tells, across containers too."""
    try:
        import fcntl
    except ImportError:
        return
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            with (folder / ".alive").open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # alive, of another user, or just made
            continue


def _load(path: Path) -> NDArray[Any] | None:
    try:
        # A plain array over the mapped file: what is not looked at is not read.
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError):
        return None
