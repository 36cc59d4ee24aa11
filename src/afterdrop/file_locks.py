"""File locks of the operating system, which are released when the process ends in any way.

Some systems (Windows) and file systems (Lustre, as it is often mounted) do not have them. What
reserves a folder for one process then goes on without; what several processes share is refused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from afterdrop.errors import FileError

try:
    import fcntl
except ImportError:  # a system without flock, on which users must not run processes concurrently
    fcntl = None  # type: ignore[assignment]

# By the file system. The last two are the same number on Linux, and not on macOS.
_NOT_SUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


def without_waiting(path: str, flags: int) -> int:
    """Opens a file for `open`; a pipe at once, and not only when its other end is opened too."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def in_place(path: str, flags: int) -> int:
    """As `without_waiting`, but refuses a symbolic link: a file elsewhere would be written to."""
    return without_waiting(path, flags | getattr(os, "O_NOFOLLOW", 0))


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Waits for the lock of a file, across processes, threads and hosts that share the file.

    Raises:
        FileError: If the file system does not support locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", opener=in_place) as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                raise FileError(
                    f"cannot lock {path}: {error}; use a folder on a file system with file locks"
                ) from error
        yield


@contextmanager
def sole_lock(path: Path) -> Iterator[None]:
    """Takes the lock of a file without waiting, and removes the file when done.

    The file of a process that was killed stays, but its lock does not.

    Raises:
        BlockingIOError: If another process holds the lock.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, sole_lock(Path(folder, "lock")):
        ...     with suppress(BlockingIOError), sole_lock(Path(folder, "lock")):
        ...         print("never printed")
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = open(path, "a", opener=in_place)  # noqa: SIM115 (open while the lock is held)
        except FileNotFoundError:
            continue  # another process has just removed the folder, because it was empty
        with file:
            take(file)
            if not _is_at(file, path):
                continue  # the process that held the lock has just removed its file
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()
            return


def take(file: IO[Any]) -> None:
    """Takes the lock of an open file without waiting; closing the file releases it.

    Does nothing where locks are not supported.

    Raises:
        BlockingIOError: If another process, or another opening of the file, holds the lock.
        FileError: If the file system fails.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise FileError(
                f"cannot lock {file.name}: {error}; use a folder on another file system"
            ) from error


def remove_unlocked(path: Path) -> None:
    """Removes a file unless a process has locked it, or this cannot be determined.

    The file is locked meanwhile, so that a process that has just created it notices that it is
    gone: it cannot take the lock, or finds no link to the file.
    """
    with suppress(OSError), open(path, "rb", opener=in_place) as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            path.unlink()


def _is_at(file: IO[Any], path: Path) -> bool:
    """Whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


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
        self._file = open(self.path, "w", opener=in_place)
        take(self._file)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._file is not None
        with suppress(OSError):
            self.path.unlink()
        self._file.close()


def is_dead(folder: Path, worker: str) -> bool | None:
    """Whether a worker has ended; None if this cannot be determined on this host."""
    path = folder / f"{worker}.alive"
    if fcntl is None or not path.exists():
        return None
    try:
        with open(path, "rb", opener=in_place) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
