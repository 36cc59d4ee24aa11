"""When a trial is hopeless: worse than most others were at the same interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Cautious, because a high learning rate looks bad until it drops: only the worst quarter is
# stopped, not before a third of the intervals, and not before there are a few trials to compare
# with.
_WORST = 0.25
_WARM_UP = 1 / 3
_LEAST_TRIALS = 6


def is_hopeless(
    curve: Mapping[int, float], others: Sequence[Mapping[int, float]], intervals: int
) -> bool:
    """Whether a trial should be stopped.

    Its lowest XE so far is compared with the lowest that each finished trial had reached by the
    same interval; a trial that would be among the worst quarter is stopped.

    Args:
        curve: The trial's validation XE by interval.
        others: The curves of finished trials, stopped ones among them.
        intervals: Intervals of a whole trial.

    Example:
        >>> good = [{1: 5.0, 2: 4.0 + 0.1 * i} for i in range(8)]
        >>> is_hopeless({1: 5.0, 2: 4.2}, good, 3), is_hopeless({1: 5.0, 2: 4.65}, good, 3)
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
