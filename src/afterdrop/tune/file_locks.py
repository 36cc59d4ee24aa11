"""Locks of the operating system: they end with the process that holds them, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # a system without such locks: one worker at a time is for its user to see to
    fcntl = None  # type: ignore[assignment]


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Waits for a file's lock and holds it; between processes, threads and hosts that share it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Alive:
    """A worker's sign of life in a shared folder: a file that it holds locked until it ends.

    Args:
        folder: Where the files of all workers lie.
        worker: The name of this one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Alive(Path(folder), "me"):
        ...     is_dead(Path(folder), "me"), is_dead(Path(folder), "unknown")
        (False, None)
    """

    def __init__(self, folder: Path, worker: str) -> None:
        self.path = folder / f"{worker}.alive"
        self._file: IO[str] | None = None

    def __enter__(self) -> Alive:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "w")
        if fcntl is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._file is not None
        with suppress(OSError):
            self.path.unlink()
        self._file.close()


def is_dead(folder: Path, worker: str) -> bool | None:
    """Whether a worker has ended; None if this host cannot tell."""
    path = folder / f"{worker}.alive"
    if fcntl is None:
        return None
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError:
        return False
    return True
