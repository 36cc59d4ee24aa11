"""The journal of a study: one line per operation, each with its number and a digest.

Workers append under a lock that is released when they are killed. A line that a killed writer left
incomplete is removed by the next one. Lines that were lost or changed are noticed, because every
later state depends on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from afterdrop.errors import AfterdropError, DamagedError, FileError
from afterdrop.file_locks import file_lock, in_place
from afterdrop.files import DIGEST, check_seal, open_regular, parse_json, sealed
from afterdrop.plain_text import shell_word
from afterdrop.tune.checks import TuneError

_LINE = "line"
_LONGEST = 1 << 24  # bytes of a line; those of the largest settings have a few thousand


class JournalFile:
    """A journal, as Optuna's journal storage reads and writes it.

    Args:
        path: The file, which is created if necessary.

    Raises:
        OSError: If it cannot be created, or is a symbolic link: a file elsewhere would be changed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     journal = JournalFile(Path(folder, "journal.log"))
        ...     journal.append_logs([{"op_code": 1}, {"op_code": 2}])
        ...     list(journal.read_logs(1))
        [{'op_code': 2}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = (0, 0)  # a number of lines, and of the bytes that they have
        with open(path, "ab", opener=in_place):
            pass

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The operations from a number on.

        Raises:
            TuneError: If lines were lost or changed; says how to go on.
        """
        with BufferedReader(open_regular(self.path)) as file:
            for number, line, end in self._lines(file, log_number_from):
                record = self._verified(number, line)
                self._known = (number + 1, end)
                yield record

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Appends operations and waits until they are on the disk.

        Raises:
            FileError: If the journal cannot be written to.
        """
        try:
            self._append(logs)
        except AfterdropError:
            raise
        except OSError as error:
            raise FileError(
                f"cannot write to the journal {self.path}: {error}; make room and run the same "
                "command again, which goes on from there"
            ) from error

    def _append(self, logs: list[dict[str, Any]]) -> None:
        lock = self.path.with_name(".journal.lock")
        with file_lock(lock), open(self.path, "rb+", opener=in_place) as file:
            count, end = self._known
            for number, _, place in self._lines(file, count):
                count, end = number + 1, place
            file.seek(end)
            file.truncate()  # an incomplete line, left by a killed writer
            for number, log in enumerate(logs, start=count):
                file.write(json.dumps(sealed({**log, _LINE: number})).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _lines(self, file: BinaryIO, first: int) -> Iterator[tuple[int, bytes, int]]:
        """Number and content of the complete lines from `first` on, and where each ends."""
        number, end = self._known if self._known[0] <= first else (0, 0)
        if os.fstat(file.fileno()).st_size < end:
            raise TuneError(
                f"the journal {self.path} lost lines while the study was running; run the same "
                "command again, which goes on from those that are left, or restore a copy first"
            )
        file.seek(end)
        for line in iter(lambda: file.readline(_LONGEST), b""):
            if not line.endswith(b"\n") and len(line) < _LONGEST:
                return
            end += len(line)
            if number >= first:
                yield number, line, end
            number += 1

    def _verified(self, number: int, line: bytes) -> dict[str, Any]:
        source = f"line {number + 1} of {self.path}"
        try:
            record = parse_json(line, source)
            if not isinstance(record, dict):
                raise DamagedError(f"{source} is not an operation of a study")
            check_seal(source, record)
            if record.get(_LINE) != number:
                raise DamagedError(f"{source} is not where it was written")
        except DamagedError as error:
            kept = shell_word(self.path.with_suffix(".kept"))
            path = shell_word(self.path)
            raise TuneError(
                f"the journal is damaged: {error}. Restore a copy of it; or keep its first "
                f"{number} lines, from which the same command goes on: "
                f"head -n {number} {path} > {kept} && mv {kept} {path}"
            ) from error
        return {name: value for name, value in record.items() if name not in (_LINE, DIGEST)}
