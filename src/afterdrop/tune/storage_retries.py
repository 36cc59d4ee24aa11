"""Operations on a storage that may be away for a while, such as a database that is restarted."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from afterdrop.tune.checks import TuneError

PATIENCE = 300.0  # seconds in which an operation is tried again
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_Method = TypeVar("_Method", bound=Callable[..., Any])
_thread = threading.local()


class StorageAway(Exception):
    """The storage cannot be reached now."""


class StorageNotOpened(StorageAway, TuneError):
    """The storage could not be reached when it was opened.

    At the start of a study its address may be wrong, so that this is an error; later it is not.
    """


@contextlib.contextmanager
def no_retries() -> Iterator[None]:
    """Operations in here fail at once, for callers that repeat them anyway."""
    before = getattr(_thread, "inside", False)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = before


def retried(operation: _Method) -> _Method:
    """Repeats an operation with growing pauses while the storage is away.

    Within an operation, others are not repeated by themselves: its lock is gone with the storage,
    so that it must be done again as a whole, which is as safe as a worker that was killed.

    Raises:
        TuneError: If the storage stays away.
    """

    @functools.wraps(operation)
    def repeated(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "inside", False):
            return operation(*args, **kwargs)
        pause, until = _FIRST_PAUSE, time.monotonic() + PATIENCE
        said = False
        with no_retries():
            while True:
                try:
                    return operation(*args, **kwargs)
                except StorageAway as error:
                    if time.monotonic() + pause > until:
                        raise TuneError(
                            f"the storage of the study was away for {PATIENCE:.0f} s ({error}). "
                            "Finished trials are kept; run the same command when it is back."
                        ) from None
                    if not said:
                        print(
                            f"afterdrop: the storage of the study is away ({error}); trying again "
                            f"for {PATIENCE:.0f} s",
                            file=sys.stderr,
                            flush=True,
                        )
                        said = True
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    return cast(_Method, repeated)
