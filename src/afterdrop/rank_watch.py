"""Says which ranks the others are waiting for, when one of them hangs.

A rank that dies is noticed at once, because its connection closes. A rank that is frozen (a stopped
process, a hung GPU or host) is not: the others wait in a collective operation. Each rank therefore
notes in the store of the process group how many collective operations it has entered. A rank that
has waited for a minute reads these notes and names the ranks that have entered fewer. It does the
same while the ranks join the group.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from afterdrop.errors import RankError

VARIABLE = "AFTERDROP_RANK_TIMEOUT"
_DEFAULT = 3600.0  # seconds; the slowest rank may need long for its last batch
_SAY_AFTER = 60.0
_BEAT = 1.0  # seconds between notes of a rank
_LOOK = timedelta(seconds=5)  # to read a note from the store


def give_up_after() -> timedelta:
    """How long a rank waits for the others in one operation: AFTERDROP_RANK_TIMEOUT seconds.

    Raises:
        RankError: If the variable is not a positive number.

    Example:
        >>> give_up_after()
        datetime.timedelta(seconds=3600)
    """
    text = os.environ.get(VARIABLE, str(_DEFAULT))
    try:
        seconds = float(text)
        if not 0 < seconds < 1e9:
            raise ValueError
    except ValueError:
        raise RankError(f"{VARIABLE}={text!r} must be a positive number of seconds") from None
    return timedelta(seconds=seconds)


class RankWatch:
    """Notes the progress of this rank, and speaks up when it has waited for long.

    Args:
        store: The store of the process group; None to watch nothing.
        rank: This rank.
        count: The number of ranks.
        limit: Seconds after which a rank gives up; it speaks up after a minute or half of this.
    """

    def __init__(self, store: Any, rank: int, count: int, limit: float) -> None:
        self._store, self.rank, self.count, self._limit = store, rank, count, limit
        self._entered = self._noted = 0
        self._since: float | None = None
        self._said = False
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="rank watch", daemon=True).start()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective operation."""
        self._entered += 1
        self._since, self._said = time.monotonic(), False
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()

    def gave_up(self, waited: float) -> bool:
        """Whether an operation that failed after `waited` seconds failed because of the limit."""
        return waited > 0.9 * self._limit

    def missing(self) -> list[int]:
        """The ranks that have not entered the operation in which this rank is or was."""
        found = []
        for rank in range(self.count):
            if rank != self.rank and self._read(rank) < self._entered:
                found.append(rank)
        return found

    def _read(self, rank: int) -> int:
        try:
            key = _key(rank)
            self._store.wait([key], _LOOK)
            return int(self._store.get(key))
        except Exception:  # nothing was noted, or the store is gone: whose host is unknown
            return 0

    def _run(self) -> None:
        say_after = _say_after(self._limit)
        while not self._closed.wait(min(_BEAT, say_after / 4)):
            with contextlib.suppress(Exception):  # the store is gone when the group is
                if self._noted != self._entered:
                    self._noted = self._entered
                    self._store.set(_key(self.rank), str(self._noted))
            since = self._since
            if since is not None and not self._said and time.monotonic() - since > say_after:
                self._said = True
                self._say(time.monotonic() - since)

    def _say(self, waited: float) -> None:
        missing = self.missing()
        if self._since is not None:
            _say(self.rank, waited, missing, self._limit)


@contextlib.contextmanager
def joining(store: Any, rank: int, count: int) -> Iterator[None]:
    """Around joining a process group: speaks up when other ranks do not come.

    Args:
        store: The store through which the ranks meet.
        rank: This rank.
        count: The number of ranks.
    """
    limit = give_up_after().total_seconds()
    waited, own = _say_after(limit), store.clone()  # the store itself is busy while it waits
    store.set(_joined(rank), "")

    def look() -> None:
        with contextlib.suppress(Exception):  # the store is gone
            missing = [other for other in range(count) if not own.check([_joined(other)])]
            _say(rank, waited, missing, limit)

    timer = threading.Timer(waited, look)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_after(limit: float) -> float:
    """Seconds after which a rank that gives up after `limit` says what it waits for."""
    return min(_SAY_AFTER, limit / 2)


def _say(rank: int, waited: float, missing: list[int], limit: float) -> None:
    if missing:
        print(
            f"afterdrop: rank {rank} has waited {waited:.0f} s for {named(missing)}, and gives up "
            f"after {limit:.0f} s ({VARIABLE}); it may be busy, stopped or hanging",
            file=sys.stderr,
            flush=True,
        )


def named(ranks: list[int]) -> str:
    """Ranks in words.

    Example:
        >>> named([1]), named([1, 3])
        ('rank 1', 'ranks 1, 3')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _key(rank: int) -> str:
    return f"afterdrop/entered/{rank}"


def _joined(rank: int) -> str:
    return f"afterdrop/joined/{rank}"
