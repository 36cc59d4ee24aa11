"""Validation intervals, learning-rate drops, early stopping and when averaging starts.

The rules are those of deepmind/lamb. A validation interval is `steps_per_interval` training steps
and the validation after them. Validation 0 is that of the untrained model; validation i comes after
i intervals, and the last one is validation n = `intervals`. The following rules apply after each
validation i, in this order; b is the validation with the lowest XE so far (on ties the earliest),
best(i) the lowest XE up to validation i, and E(i) = 1 + ⌊(E − 1)/R · min(R, i)⌋ the patience E with
ramp-up R:

    stop       i ≥ n
               i > b + E(i)
               rate < slowest                 rate = (best(i − E(i)) − best(i)) / E(i)
               best(i) − rate · (n − i) > target[number of drops]
    drop       i > max(b, last drop) + patience, or i ≥ `drop_latest` if never dropped
    average    i > 0 and i − b ≥ patience, or i ≥ `latest`; two-tailed averaging has its own rules

Everything here is a pure function: (state, XE) → state. Weights are not rolled back at a drop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from afterdrop.train.sections import AveragingSection, ScheduleSection


@dataclass(frozen=True)
class ScheduleState:
    """The state of a schedule: plain, JSON-serialisable values.

    Attributes:
        interval: Number of the last validation; -1 before the first.
        best_interval: Number of the validation with the lowest XE.
        bests: The lowest XE up to each validation.
        drops: Number of learning-rate drops.
        last_drop: Number of the validation at the last drop; -1 before the first.
        averaging: Whether weights are averaged from here on.
        stopped: Why training ended, or None.
    """

    interval: int = -1
    best_interval: int = -1
    bests: tuple[float, ...] = ()
    drops: int = 0
    last_drop: int = -1
    averaging: bool = False
    stopped: str | None = None

    @property
    def best(self) -> float:
        """The lowest XE so far; infinite before the first."""
        return self.bests[-1] if self.bests else math.inf

    @property
    def is_best(self) -> bool:
        """Whether the last validation gave the lowest XE so far."""
        return self.interval == self.best_interval


def advance(
    state: ScheduleState, xe: float, schedule: ScheduleSection, averaging: AveragingSection
) -> ScheduleState:
    """The state after the next validation, which gave `xe`.

    Example:
        >>> schedule = ScheduleSection(steps_per_interval=100, intervals=2)
        >>> state = advance(ScheduleState(), 5.0, schedule, AveragingSection())
        >>> state = advance(state, 4.0, schedule, AveragingSection())
        >>> state.best_interval, state.best, state.stopped
        (1, 4.0, None)
        >>> advance(state, 4.5, schedule, AveragingSection()).stopped
        'all 2 intervals are done'
    """
    interval = state.interval + 1
    if xe < state.best:
        state = replace(state, interval=interval, best_interval=interval, bests=(*state.bests, xe))
    else:
        state = replace(state, interval=interval, bests=(*state.bests, state.best))
    state = replace(state, stopped=_reason_to_stop(state, schedule))
    if _drop_due(state, schedule):
        state = replace(state, drops=state.drops + 1, last_drop=interval)
    return replace(state, averaging=state.averaging or _averaging_due(state, averaging))


def learning_rate(base: float, state: ScheduleState, schedule: ScheduleSection) -> float:
    """The learning rate after the drops so far.

    Example:
        >>> schedule = ScheduleSection(steps_per_interval=100, intervals=2, drop_factor=0.5)
        >>> learning_rate(0.004, ScheduleState(drops=2), schedule)
        0.001
    """
    return base * schedule.drop_factor**state.drops


def patience_at(interval: int, patience: int, rampup: int) -> int:
    """E(interval), the intervals without a new best that early stopping tolerates.

    Example:
        >>> [patience_at(interval, 30, 60) for interval in (0, 1, 5, 10, 20, 30, 60, 90)]
        [1, 1, 3, 5, 10, 15, 30, 30]
    """
    return patience if rampup == 0 else 1 + int((patience - 1) / rampup * min(rampup, interval))


def _reason_to_stop(state: ScheduleState, schedule: ScheduleSection) -> str | None:
    if state.interval >= schedule.intervals:
        return f"all {schedule.intervals} intervals are done"
    if schedule.stop_patience is None:
        return None
    patience = patience_at(state.interval, schedule.stop_patience, schedule.stop_rampup)
    if state.interval > state.best_interval + patience:
        return f"no better validation XE for more than {patience} intervals"
    if len(state.bests) <= patience:
        return None
    rate = (state.bests[-1 - patience] - state.best) / patience
    if rate < schedule.stop_slowest:
        return f"improvement of {rate:.2g} nats per interval is below {schedule.stop_slowest:g}"
    if schedule.stop_targets:
        target = schedule.stop_targets[min(state.drops, len(schedule.stop_targets) - 1)]
        expected = state.best - rate * (schedule.intervals - state.interval)
        if expected > target:
            return f"the best XE to expect is {expected:.3f}, worse than the target {target:g}"
    return None


def _drop_due(state: ScheduleState, schedule: ScheduleSection) -> bool:
    last = max(state.best_interval, state.last_drop)
    if schedule.drop_patience is not None and state.interval > last + schedule.drop_patience:
        return True
    never = state.last_drop == -1
    return never and schedule.drop_latest is not None and state.interval >= schedule.drop_latest


def _averaging_due(state: ScheduleState, averaging: AveragingSection) -> bool:
    if averaging.kind == "two-tailed":
        return False
    stale = state.interval - state.best_interval
    if averaging.patience is not None and state.interval > 0 and stale >= averaging.patience:
        return True
    return averaging.latest is not None and state.interval >= averaging.latest
