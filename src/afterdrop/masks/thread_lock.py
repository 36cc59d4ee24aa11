"""A lock between the threads of a process, which is free in a process that is forked from it."""

import os
import threading
from collections.abc import Callable


def in_forked_processes(call: Callable[[], object]) -> None:
    """Calls something at the start of every forked process, which has none of the other threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


class ThreadLock:
    """A lock for `with` blocks, for as long as the process lives.

    Example:
        >>> with ThreadLock():
        ...     print("alone")
        alone
    """

    def __init__(self) -> None:
        self._renew()
        in_forked_processes(self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
