"""Ctrl-C and SIGTERM as stop requests, so that a run can finish the step and save, or as errors.

A second signal has its usual effect, so that what hangs can be ended. One that follows at once does
not count: `timeout` and torchrun send a signal to a process and to the group that it is in.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM, as `KeyboardInterrupt` is Ctrl-C."""


class StopRequest:
    """The signal that requested a stop, if any.

    Attributes:
        signal: Its name; None if there was none.
        since: When it arrived, in seconds of `time.monotonic`.

    Example:
        >>> with stop_request() as request:
        ...     signal.raise_signal(signal.SIGINT)
        ...     request.signal
        'SIGINT'
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.since = 0.0


_ECHO = 1.0  # seconds after a signal in which others are the same request
_ACTIVE: list[StopRequest] = []  # nested requests, all of which a signal reaches


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Makes the first SIGINT or SIGTERM a stop request; a second one has its usual effect.

    Outside the main thread, where Python does not allow handlers, signals keep their effect.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if request.signal is None:
            for active in _ACTIVE:
                active.signal, active.since = signal.Signals(number).name, now
        elif now - request.since > _ECHO:
            restore()
            signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, ask)
    _ACTIVE.append(request)
    try:
        yield request
    finally:
        _ACTIVE.remove(request)
        restore()


def pending_stop() -> StopRequest | None:
    """A stop request that a signal has made and whose work has not stopped yet.

    Example:
        >>> pending_stop() is None
        True
    """
    return next((active for active in _ACTIVE if active.signal is not None), None)


@contextmanager
def sigterm_raises(error: Callable[[], BaseException]) -> Iterator[None]:
    """Makes the first SIGTERM raise an error in the main thread, so that finished work is kept.

    Args:
        error: Makes the error.

    Example:
        >>> with sigterm_raises(lambda: RuntimeError("the job was stopped")):
        ...     signal.raise_signal(signal.SIGTERM)
        Traceback (most recent call last):
        RuntimeError: the job was stopped
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    since: float | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal since
        now = time.monotonic()
        if since is None:
            since = now
            raise error()
        if now - since > _ECHO:
            signal.signal(number, before)
            signal.raise_signal(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
