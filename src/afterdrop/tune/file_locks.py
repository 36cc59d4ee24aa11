"""File locks of the operating system, which are released when the process ends in any way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # a system without flock, on which users must not run workers concurrently
    fcntl = None  # type: ignore[assignment]


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Acquires the lock of a file, across processes, threads and hosts that share the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Alive:
    """Marks a worker as alive by a locked file in a shared folder, until the process ends.

    Args:
        folder: The folder with the files of all workers.
        worker: The name of this worker.

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
    """Whether a worker has ended; None if this cannot be determined on this host."""
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
