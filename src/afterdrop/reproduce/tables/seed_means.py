"""Groups of runs that differ only in their seed, and means over such groups."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from afterdrop.reproduce.tables.table_input import TableInput


def by_seed(
    sources: Sequence[TableInput], *, without: tuple[str, ...] = ()
) -> list[list[TableInput]]:
    """Groups runs that differ only in their seed and in the settings `without`."""
    groups: dict[str, list[TableInput]] = {}
    for source in sources:
        groups.setdefault(source.but("seed", *without), []).append(source)
    return list(groups.values())


def mean_over(values: Sequence[float | None]) -> float | None:
    """The mean; None if any value is missing.

    Example:
        >>> mean_over([1.0, 2.0]), mean_over([1.0, None])
        (1.5, None)
    """
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def error_over(values: Sequence[float | None]) -> float | None:
    """Standard error of the mean over seeds; None for fewer than two values or a missing one.

    Example:
        >>> error_over([1.0, 3.0])
        1.0
    """
    known = [value for value in values if value is not None]
    if len(known) < 2 or len(known) < len(values):
        return None
    return statistics.stdev(known) / len(known) ** 0.5
