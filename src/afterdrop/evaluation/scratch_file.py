"""One file for arrays that do not fit into memory, which no process leaves behind.

Where systems allow it, the file has no name, so that the disk is freed however the process ends,
and its space is reserved before anything is written: writing to a mapped file on a full disk ends
the process. It is opened once, however many arrays there are, because the number of open files is
limited, too.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import tempfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from afterdrop.errors import FileError

FEWER_SAMPLES = (
    "set TMPDIR to a folder on a larger disk, or evaluate fewer samples, multipliers or examples"
)
_ALIGNMENT = 64  # bytes
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # says the file system


class ScratchFile:
    """Arrays in a file, in TMPDIR if that is set; for a `with` block.

    Example:
        >>> with ScratchFile() as scratch:
        ...     stored = scratch.store(np.arange(6.0).reshape(2, 3))
        ...     stored[1:, :2].tolist()
        [[3.0, 4.0]]
    """

    def __init__(self) -> None:
        self.used = 0
        self._file: IO[bytes] | None = None

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # workers of a loader may hold the file open, too
                os.ftruncate(self._file.fileno(), 0)
            self._file.close()

    @property
    def folder(self) -> str:
        """Where the file is.

        Raises:
            FileError: If no folder can be written to.
        """
        asked = os.environ.get("TMPDIR", "")  # which the module tempfile reads only once
        try:
            return asked if os.path.isdir(asked) else tempfile.gettempdir()
        except OSError as error:
            raise FileError(f"cannot keep samples: {error}; set TMPDIR to a folder") from error

    @property
    def free(self) -> int:
        """The bytes that are free on the disk."""
        return shutil.disk_usage(self.folder).free

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> ScratchArray:
        """Room for an array.

        Raises:
            FileError: If the disk is full, or no folder can hold the file.
        """
        dtype = np.dtype(dtype)
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        folder = self.folder
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="afterdrop-", dir=folder)  # noqa: SIM115
            self._reserve(self._file.fileno(), start, max(1, size))
        except OSError as error:
            raise FileError(f"cannot keep samples in {folder}: {error}; {FEWER_SAMPLES}") from error
        self.used = start + size
        return ScratchArray(self._file, start, shape, dtype)

    def store(self, array: NDArray[Any]) -> ScratchArray:
        """A copy of an array.

        Raises:
            FileError: As of `allocate`.
        """
        room = self.allocate(array.shape, array.dtype)
        room.mapped()[...] = array
        return room

    def _reserve(self, file: int, start: int, size: int) -> None:
        """Makes the file longer, by bytes that the disk has."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file, start, size)
                return
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
        if size > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, start + size)


class ScratchArray:
    """An array in a file, which is mapped into memory only while slices are read.

    Args:
        file: The open file.
        start: Its first byte there.
        shape: Its shape.
        dtype: Its dtype.
    """

    def __init__(
        self, file: IO[bytes], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._start = file, start

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """A slice, not copied."""
        return self.mapped()[index]

    def mapped(self) -> NDArray[Any]:
        """The array itself, to be written to."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self._file, self.dtype, "r+", self._start, self.shape)
