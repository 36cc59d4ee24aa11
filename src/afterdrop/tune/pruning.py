"""Pruning: a trial that is worse than most others were at the same interval is stopped early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# A high learning rate looks bad until it drops, so these values are conservative: only the worst
# quarter is stopped, after a third of the intervals and once a few trials have finished.
_WORST = 0.25
_WARM_UP = 1 / 3
_LEAST_TRIALS = 6


def should_prune(
    curve: Mapping[int, float], others: Sequence[Mapping[int, float]], intervals: int
) -> bool:
    """Whether a trial should be stopped.

    Its lowest XE so far is compared with the lowest XE of each finished trial up to the same
    interval; a trial among the worst quarter is stopped.

    Args:
        curve: The validation XE of the trial by interval.
        others: The curves of finished trials, including pruned ones.
        intervals: Number of intervals of a complete trial.

    Example:
        >>> good = [{1: 5.0, 2: 4.0 + 0.1 * i} for i in range(8)]
        >>> should_prune({1: 5.0, 2: 4.2}, good, 3), should_prune({1: 5.0, 2: 4.65}, good, 3)
        (False, True)
    """
    interval = max(curve)
    if interval < intervals * _WARM_UP or interval >= intervals:
        return False
    reached = [
        min(xe for t, xe in other.items() if t <= interval)
        for other in others
        if max(other) >= interval
    ]
    if len(reached) < _LEAST_TRIALS:
        return False
    better = sum(xe < min(curve.values()) for xe in reached)
    return better >= (1 - _WORST) * len(reached)
