"""Ctrl-C, SIGTERM and SIGHUP as stop requests, so that a run can save first, or as errors.

    stop_request     a signal is noted, and the work asks for it where it can stop
    signals_raise    a signal raises an error wherever the work is
    signals_wait     a signal waits for the end of what must be done as a whole

A second signal has its usual effect, so that what hangs can be ended. One that follows at once does
not count: `timeout` and torchrun send a signal to a process and to the group that it is in, and
people press Ctrl-C twice. Signals that the process was started to ignore, as by `nohup`, stay so.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NUMBERS = tuple(
    number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")
)
NAMES = tuple(number.name for number in NUMBERS)  # Windows has no SIGHUP


class StopSignal(KeyboardInterrupt):
    """A signal that stops the work, as `KeyboardInterrupt` does for Ctrl-C.

    Attributes:
        name: The name of the signal.

    Example:
        >>> StopSignal("SIGTERM").status
        143
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    @property
    def status(self) -> int:
        """The exit status that a shell gives a process which the signal has ended."""
        return 128 + signal.Signals[self.name]


def resumable(name: str) -> StopSignal:
    """The error for work that a signal has stopped, and that has saved itself.

    Args:
        name: The name of the signal.

    Example:
        >>> resumable("SIGTERM").__notes__
        ['run the same command to resume']
    """
    error = StopSignal(name)
    error.add_note("run the same command to resume")
    return error


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


_LEFT_ALONE = signal.SIG_IGN, None  # None: a handler that is not Python's, which cannot be restored
_ECHO = 1.0  # seconds after a signal in which others are the same request
_ACTIVE: list[StopRequest] = []  # nested requests, all of which a signal reaches


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Makes the first signal a stop request; a second one has its usual effect.

    Outside the main thread, where Python does not allow handlers, signals keep their effect.
    """
    request = StopRequest()

    def ask(number: int, restore: Callable[[], None]) -> None:
        now = time.monotonic()
        if request.signal is None:
            for active in (*_ACTIVE, request):  # it may not be among them yet
                active.signal, active.since = signal.Signals(number).name, now
        elif now - request.since > _ECHO:
            restore()
            signal.raise_signal(number)

    with _handled(NUMBERS, ask) as handled:
        if handled:
            _ACTIVE.append(request)
        try:
            yield request
        finally:
            if handled:
                _ACTIVE.remove(request)


def pending_stop() -> StopRequest | None:
    """A stop request that a signal has made and whose work has not stopped yet.

    Example:
        >>> pending_stop() is None
        True
    """
    return next((active for active in _ACTIVE if active.signal is not None), None)


@contextmanager
def signals_raise(
    error: Callable[[str], BaseException], numbers: Iterable[signal.Signals] = NUMBERS
) -> Iterator[None]:
    """Makes the first signal raise an error in the main thread, so that finished work is kept.

    For a process that ends then: from the signal on, child processes that end raise no error.

    Args:
        error: Makes the error from the name of the signal.
        numbers: The signals.

    Example:
        >>> with signals_raise(lambda name: RuntimeError(f"stopped by {name}")):
        ...     signal.raise_signal(signal.SIGTERM)
        Traceback (most recent call last):
        RuntimeError: stopped by SIGTERM
    """

    def stop(number: int) -> None:
        _let_children_end()
        raise error(signal.Signals(number).name)

    with _handled(numbers, _first_counts(stop)):
        yield


@contextmanager
def signals_wait() -> Iterator[None]:
    """Makes a signal wait for the end of what must be done as a whole, such as restoring a model.

    Example:
        >>> try:
        ...     with signals_wait():
        ...         signal.raise_signal(signal.SIGINT)
        ...         print("as a whole")
        ... except KeyboardInterrupt:
        ...     print("and then interrupted")
        as a whole
        and then interrupted
    """
    waiting: list[int] = []
    try:
        with _handled(NUMBERS, _first_counts(waiting.append)):
            yield
    finally:
        for number in waiting:
            signal.raise_signal(number)


def _first_counts(
    first: Callable[[int], None],
) -> Callable[[int, Callable[[], None]], None]:
    """A handler that passes the first signal to `first`, and gives a later one its usual effect."""
    since: float | None = None

    def handle(number: int, restore: Callable[[], None]) -> None:
        nonlocal since
        now = time.monotonic()
        if since is None:
            since = now
            first(number)
        elif now - since > _ECHO:
            restore()
            signal.raise_signal(number)

    return handle


def _let_children_end() -> None:
    """Makes child processes that end, now or later, raise no error.

    A signal to the group also ends the workers of a DataLoader, and torch answers the end of one by
    an error in the main thread, at any line: where finished work is saved, too.
    """
    if hasattr(signal, "SIGCHLD"):  # Windows does not have it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_at_next_signal(status: int) -> None:
    """Makes a signal end the process at once, for a process whose work is over.

    Otherwise a second Ctrl-C would show a traceback of the interpreter's shutdown.

    Args:
        status: The exit status.
    """
    if threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            if signal.getsignal(number) not in _LEFT_ALONE:
                signal.signal(number, lambda *_: os._exit(status))


@contextmanager
def _handled(
    numbers: Iterable[signal.Signals], handle: Callable[[int, Callable[[], None]], None]
) -> Iterator[bool]:
    """Handles signals, where that is possible; yields whether it is.

    Args:
        numbers: The signals.
        handle: Called with a signal, and a function that restores the handlers of before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    before: dict[signal.Signals, Any] = {}
    process = os.getpid()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handler(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            handle(number, restore)
        else:  # a forked process inherits handlers, and has nothing to save
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    try:
        for number in numbers:
            if (found := signal.getsignal(number)) not in _LEFT_ALONE:
                before[number] = found
                signal.signal(number, handler)
        yield True
    finally:
        restore()
