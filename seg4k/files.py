"""Atomic writing: a reader sees the old file or the whole new one, never a part of it."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is flushed to disk and renamed onto `path`.

    On an exception the temporary file is removed and `path` is left as it was. The temporary name keeps
    the suffix of `path`, since image writers choose the format by it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        # mkstemp makes private files; give the result the permissions that a plain open() would.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path | str, text: str) -> None:
    """Write `text` to `path` in UTF-8, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path | str, value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Write `value` to `path` as indented JSON, atomically.

    Raises:
        ValueError: where `value` holds NaN or infinity, which are not JSON.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def locked(path: Path | str) -> Iterator[bool]:
    """Hold the only lock on a file and yield True; False where the system or the disk has no locks."""
    with Path(path).open("a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            yield False
        else:
            yield True
