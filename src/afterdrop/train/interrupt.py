"""Ctrl-C and SIGTERM as stop requests, so that a run can finish the step and save, or as errors."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM, as `KeyboardInterrupt` is Ctrl-C."""


class StopRequest:
    """The signal that requested a stop, if any.

    Example:
        >>> with stop_request() as request:
        ...     signal.raise_signal(signal.SIGINT)
        ...     request.signal
        'SIGINT'
    """

    def __init__(self) -> None:
        self.signal: str | None = None


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
        for active in _ACTIVE:
            active.signal = signal.Signals(number).name
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, ask)
    _ACTIVE.append(request)
    try:
        yield request
    finally:
        _ACTIVE.remove(request)
        restore()


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM raise `Terminated` in the main thread, so that finished work is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
