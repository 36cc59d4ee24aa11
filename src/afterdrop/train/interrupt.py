"""Ctrl-C and SIGTERM as stop requests, so that a run can finish the step and save."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


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
        request.signal = signal.Signals(number).name
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, ask)
    try:
        yield request
    finally:
        restore()
