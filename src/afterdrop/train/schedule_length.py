"""A schedule of the same shape at another length."""

from __future__ import annotations

from typing import Any

from afterdrop.train.checks import check_count
from afterdrop.train.config import TrainConfig

# A patience of one or two intervals would react to the noise of single validations.
LEAST_PATIENCE = 3


def shorten(
    config: TrainConfig, intervals: int, steps_per_interval: int | None = None
) -> TrainConfig:
    """A configuration whose schedule has fewer (or more) validation intervals.

    The shape of the schedule is kept: the learning rate drops, and averaging starts, after the same
    fraction of training as in the original. So everything that counts intervals (`drop_latest`,
    `averaging.latest`, the ramp-up and every patience) is scaled with their number. A patience
    does not fall below 3 intervals, unless the original is shorter. `stop_targets` and
    `stop_slowest` are removed, because they were chosen for training of the original length.

    Args:
        config: The original.
        intervals: The new number of validation intervals.
        steps_per_interval: Their new length; None is that of the original.

    Returns:
        The configuration itself if its schedule has that length already.

    Raises:
        ConfigError: If a number is not positive.

    Example:
        >>> from afterdrop import recipes
        >>> schedule = shorten(recipes.load("ptb-10m").config, 100).schedule
        >>> schedule.intervals, schedule.drop_latest, schedule.drop_patience, schedule.stop_targets
        (100, 90, 3, ())
    """
    schedule = config.schedule
    steps = schedule.steps_per_interval if steps_per_interval is None else steps_per_interval
    check_count("intervals", intervals)
    check_count("steps_per_interval", steps)
    if (intervals, steps) == (schedule.intervals, schedule.steps_per_interval):
        return config

    def scaled(count: int | None, least: int) -> int | None:
        # Rounded down, so that what happened before the end still does.
        return None if count is None else max(count * intervals // schedule.intervals, least)

    def patience(count: int | None) -> int | None:
        return None if count is None else scaled(count, min(count, LEAST_PATIENCE))

    changes: dict[str, Any] = {
        "schedule.intervals": intervals,
        "schedule.steps_per_interval": steps,
        "schedule.drop_latest": scaled(schedule.drop_latest, 1),
        "schedule.drop_patience": patience(schedule.drop_patience),
        "schedule.stop_patience": patience(schedule.stop_patience),
        "schedule.stop_rampup": scaled(schedule.stop_rampup, 0),
        "schedule.stop_targets": [],
        "schedule.stop_slowest": 0.0,
        "averaging.latest": scaled(config.averaging.latest, 1),
        "averaging.patience": patience(config.averaging.patience),
    }
    return config.override(changes)
