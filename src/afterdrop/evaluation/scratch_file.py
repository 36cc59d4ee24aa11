"""One file for arrays that do not fit into memory, which no process leaves behind.

It has no name where systems allow that, so that the disk is freed however the process ends, and its
space is reserved before anything is written: writing to a mapped file on a full disk would end the
process. It is opened once, however many arrays there are, because the number of open files is
limited, too.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from typing import Any

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
        ...     kept = scratch.kept(np.arange(6.0).reshape(2, 3))
        ...     kept[1:, :2]
        array([[3., 4.]])
    """

    def __init__(self) -> None:
        self.folder = tempfile.gettempdir()
        self.used = 0
        self._file = tempfile.TemporaryFile(prefix="afterdrop-", dir=self.folder)  # noqa: SIM115

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def free(self) -> int:
        """The bytes that are free on the disk."""
        return shutil.disk_usage(self.folder).free

    def room(self, shape: tuple[int, ...], dtype: Any) -> ScratchArray:
        """Room for an array.

        Raises:
            FileError: If the disk is full.
        """
        dtype = np.dtype(dtype)
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        size = math.prod(shape) * dtype.itemsize
        try:
            self._reserve(start, max(1, size))
        except OSError as error:
            raise FileError(
                f"cannot keep samples in {self.folder}: {error}; {FEWER_SAMPLES}"
            ) from error
        self.used = start + size
        return ScratchArray(self._file, start, shape, dtype)

    def kept(self, array: NDArray[Any]) -> ScratchArray:
        """A copy of an array.

        Raises:
            FileError: If the disk is full.
        """
        room = self.room(array.shape, array.dtype)
        room.mapped()[...] = array
        return room

    def _reserve(self, start: int, size: int) -> None:
        """Makes the file longer, by bytes that the disk has."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._file.fileno(), start, size)
                return
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
        if size > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._file.fileno(), start + size)


class ScratchArray:
    """An array in a file, which is mapped into memory only while slices are read.

    Args:
        file: The open file.
        start: Its first byte there.
        shape: Its shape.
        dtype: Its dtype.
    """

    def __init__(self, file: Any, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype
        self._file, self._start = file, start

    def __getitem__(self, index: Any) -> NDArray[Any]:
        return np.array(self.mapped()[index])

    def mapped(self) -> NDArray[Any]:
        """The array itself, to be written to."""
        if 0 in self.shape:
            return np.empty(self.shape, self.dtype)
        return np.memmap(self._file, self.dtype, "r+", self._start, self.shape)
