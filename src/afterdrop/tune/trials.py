"""Trials as a storage records them, and what follows from their records.

A trial that is lost with its worker is followed by another attempt at the same point. What must
happen next is derived from the records and never remembered, because a worker can die at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from afterdrop.tune.search_space import Point

State = Literal["waiting", "running", "complete", "pruned", "failed"]
ATTEMPTS = 3  # a point that has killed this many workers (out of memory, say) is not tried again


@dataclass(frozen=True)
class Trial:
    """A trial as a storage has it.

    Attributes:
        number: Its number in the study.
        state: Where it stands.
        point: What is tried.
        value: Its validation XE, if it has one.
        notes: What workers wrote down about it, JSON-friendly.
        curve: Validation XE by interval.
    """

    number: int
    state: State
    point: Point
    value: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Count:
    """How far a study is.

    Attributes:
        given: Points given out so far.
        open: Points that are being tried or wait to be.
    """

    given: int
    open: int

    def over(self, trials: int) -> bool:
        """Whether all points of so many have an end."""
        return self.given >= trials and self.open == 0


def is_retried(row: Trial) -> bool:
    """Whether a lost trial is given out again."""
    if row.state != "failed" or not row.notes.get("lost"):
        return False
    return bool(row.notes.get("handed_back")) or row.notes.get("attempt", 1) < ATTEMPTS


def origin(row: Trial) -> int:
    """The number under which a trial's point was given out first; its folder has that name."""
    return int(row.notes.get("origin", row.number))


def ends(rows: Sequence[Trial]) -> list[Trial]:
    """One trial a point, in the order of the points: its last attempt."""
    last: dict[int, Trial] = {}
    for row in rows:
        last[origin(row)] = row
    return [last[number] for number in sorted(last)]


def count(rows: Sequence[Trial]) -> Count:
    """How many points were given out, and how many have no end yet."""
    points = ends(rows)
    unended = [r for r in points if r.state in ("waiting", "running") or is_retried(r)]
    return Count(len(points), len(unended))
