"""Trials as a storage records them, and what follows from their records.

A trial that is lost with its worker is followed by another attempt at the same point. What must
happen next is derived from the records and never remembered, because a worker can die at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from afterdrop.tune.search_space import Point
from afterdrop.typed_records import read_record

State = Literal["waiting", "running", "complete", "pruned", "failed"]
ATTEMPTS = 3  # a point whose workers died this many times (out of memory, say) is not tried again


@dataclass(frozen=True)
class Trial:
    """A trial as recorded in a storage.

    Attributes:
        number: Its number in the study.
        state: Its state.
        point: The point that is tried.
        value: Its validation XE, if it has one.
        notes: JSON-compatible notes of the workers.
        curve: Validation XE by interval.
    """

    number: int
    state: State
    point: Point
    value: float | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    curve: Mapping[int, float] = field(default_factory=dict)


class _Notes(TypedDict, total=False):
    """Notes that decide what happens to a trial, among others."""

    of: int
    seed: int
    origin: int
    retry_of: int
    attempt: int
    lost: bool
    handed_back: bool
    reason: str
    worker: str


def read_trial(record: object) -> Trial:
    """A trial from plain values, as JSON keeps them.

    Raises:
        ValueError: If a field or a note is missing or of another type; names it.
    """
    trial = read_record(Trial, record, "trial")
    read_record(_Notes, trial.notes, f"trial {trial.number}: notes")
    return trial


@dataclass(frozen=True)
class Count:
    """The progress of a study.

    Attributes:
        given: Number of points so far.
        open: Number of points that are waiting or running.
    """

    given: int
    open: int

    def over(self, trials: int) -> bool:
        """Whether there are `trials` points and all of them have ended."""
        return self.given >= trials and self.open == 0


def is_retried(row: Trial) -> bool:
    """Whether a trial was lost and its point is tried again."""
    if row.state != "failed" or not row.notes.get("lost"):
        return False
    return bool(row.notes.get("handed_back")) or row.notes.get("attempt", 1) < ATTEMPTS


def origin(row: Trial) -> int:
    """The number of the first trial of a point, which also names its run folder."""
    return int(row.notes.get("origin", row.number))


def ends(rows: Sequence[Trial]) -> list[Trial]:
    """The last attempt at each point, in the order of the points."""
    last: dict[int, Trial] = {}
    for row in rows:
        last[origin(row)] = row
    return [last[number] for number in sorted(last)]


def count(rows: Sequence[Trial]) -> Count:
    """Counts the points and those that have not ended."""
    points = ends(rows)
    unended = [r for r in points if r.state in ("waiting", "running") or is_retried(r)]
    return Count(len(points), len(unended))
