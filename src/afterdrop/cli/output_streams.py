"""Output and error streams that are missing or cannot be written to.

What a command shows is not what it computes: a terminal that was closed or a log on a full disk
must not end a training.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class WatchedStream:
    """A stream that remembers whether it could not be written to.

    Args:
        stream: The stream, which all else is left to.
        optional: Whether what cannot be written is lost without an error.
    """

    def __init__(self, stream: Any, *, optional: bool) -> None:
        self.failed = False
        self._stream, self._optional = stream, optional

    def write(self, text: str) -> int:
        """Writes a text."""
        with self._watched():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered."""
        with self._watched():
            self._stream.flush()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self.failed = True
            if not self._optional:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def watched_streams(*, last: bool) -> Iterator[None]:
    """Opens streams that are closed, and lets errors of the error stream pass.

    Args:
        last: Whether the process ends afterwards, so that they stay as they are.
    """
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # opened first, or a file of the work would take its place
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
    sys.stdout = WatchedStream(sys.stdout, optional=False)
    sys.stderr = WatchedStream(sys.stderr, optional=True)
    try:
        yield
    finally:
        if not last:
            sys.stdout, sys.stderr = before


def output_failed() -> bool:
    """Whether output could not be written, as by `afterdrop ... | head` after a few lines."""
    return isinstance(sys.stdout, WatchedStream) and sys.stdout.failed


def drop_output() -> None:
    """Sends what is still to be written nowhere, or the end of the interpreter would fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
