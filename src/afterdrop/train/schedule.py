"""Turns, learning-rate drops, early stopping and the start of averaging, as deepmind/lamb has them.

A turn is a validation and the `steps_per_turn` steps after it; turn 0 validates the untrained
model, and training ends with the validation of turn `turns`. With the best XE so far at turn
`best` (strictly lower counts), after each validation, in this order:

    stop       turn ≥ turns
               turn > best + E(turn)          E(t) = 1 + ⌊(E − 1)/R · min(R, t)⌋, ramp-up R
               (best E turns ago − best)/E < slowest
               best − (best E turns ago − best) · (turns − turn)/E > target[number of drops]
    drop       turn > max(best, last drop) + patience, or at `drop_latest` if never dropped
    average    turn > 0 and turn − best ≥ patience, or at `latest`

Everything here is a pure function: (state, XE) → state. Weights are not rolled back at a drop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from afterdrop.train.sections import AveragingSection, ScheduleSection


@dataclass(frozen=True)
class ScheduleState:
    """Where a schedule is; plain values, JSON-friendly.

    Attributes:
        turn: The last turn that was validated; -1 before the first.
        best_turn: The turn of the lowest XE.
        bests: The lowest XE up to each turn.
        drops: Number of learning-rate drops.
        last_drop: Turn of the last drop; -1 before the first.
        averaging: Whether weights are averaged from here on.
        stopped: Why training ended, or None.
    """

    turn: int = -1
    best_turn: int = -1
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
        """Whether the last turn brought the lowest XE."""
        return self.turn == self.best_turn


def advance(
    state: ScheduleState, xe: float, schedule: ScheduleSection, averaging: AveragingSection
) -> ScheduleState:
    """The state after the next turn's validation gave `xe`.

    Example:
        >>> schedule = ScheduleSection(steps_per_turn=100, turns=2)
        >>> state = advance(ScheduleState(), 5.0, schedule, AveragingSection())
        >>> state = advance(state, 4.0, schedule, AveragingSection())
        >>> state.best_turn, state.best, state.stopped
        (1, 4.0, None)
        >>> advance(state, 4.5, schedule, AveragingSection()).stopped
        'all 2 turns are done'
    """
    turn = state.turn + 1
    if xe < state.best:
        state = replace(state, turn=turn, best_turn=turn, bests=(*state.bests, xe))
    else:
        state = replace(state, turn=turn, bests=(*state.bests, state.best))
    state = replace(state, stopped=_reason_to_stop(state, schedule))
    if _drop_due(state, schedule):
        state = replace(state, drops=state.drops + 1, last_drop=turn)
    return replace(state, averaging=state.averaging or _averaging_due(state, averaging))


def learning_rate(base: float, state: ScheduleState, schedule: ScheduleSection) -> float:
    """The learning rate after the drops so far.

    Example:
        >>> schedule = ScheduleSection(steps_per_turn=100, turns=2, drop_factor=0.5)
        >>> learning_rate(0.004, ScheduleState(drops=2), schedule)
        0.001
    """
    return base * schedule.drop_factor**state.drops


def patience_at(turn: int, patience: int, rampup: int) -> int:
    """E(turn), the turns without a new best that early stopping bears.

    Example:
        >>> [patience_at(turn, 30, 60) for turn in (0, 1, 5, 10, 20, 30, 60, 90)]
        [1, 1, 3, 5, 10, 15, 30, 30]
    """
    return patience if rampup == 0 else 1 + int((patience - 1) / rampup * min(rampup, turn))


def _reason_to_stop(state: ScheduleState, schedule: ScheduleSection) -> str | None:
    if state.turn >= schedule.turns:
        return f"all {schedule.turns} turns are done"
    if schedule.stop_patience is None:
        return None
    patience = patience_at(state.turn, schedule.stop_patience, schedule.stop_rampup)
    if state.turn > state.best_turn + patience:
        return f"no better validation XE for more than {patience} turns"
    if len(state.bests) <= patience:
        return None
    rate = (state.bests[-1 - patience] - state.best) / patience
    if rate < schedule.stop_slowest:
        return f"improvement of {rate:.2g} nats a turn is below {schedule.stop_slowest:g}"
    if schedule.stop_targets:
        target = schedule.stop_targets[min(state.drops, len(schedule.stop_targets) - 1)]
        expected = state.best - rate * (schedule.turns - state.turn)
        if expected > target:
            return f"the best XE to expect is {expected:.3f}, worse than the target {target:g}"
    return None


def _drop_due(state: ScheduleState, schedule: ScheduleSection) -> bool:
    last = max(state.best_turn, state.last_drop)
    if schedule.drop_patience is not None and state.turn > last + schedule.drop_patience:
        return True
    never = state.last_drop == -1
    return never and schedule.drop_latest is not None and state.turn >= schedule.drop_latest


def _averaging_due(state: ScheduleState, averaging: AveragingSection) -> bool:
    stale = state.turn - state.best_turn
    if averaging.patience is not None and state.turn > 0 and stale >= averaging.patience:
        return True
    return averaging.latest is not None and state.turn >= averaging.latest
