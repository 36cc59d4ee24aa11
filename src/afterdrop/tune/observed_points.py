"""The points tried so far, as the proposal of the next point sees them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from afterdrop.tune.search_space import Point
from afterdrop.tune.trials import Trial, is_retried

Standing = Literal["known", "bad", "pending"]
# Values further above the median than this many times its distance to the best are cut there. They
# say that a point is bad; how bad (a perplexity of thousands) would flatten all else.
_CUT = 3.0


class Seen(NamedTuple):
    """A point that was given out before.

    Attributes:
        point: The point.
        standing: `"known"` with a value, `"bad"` if its training failed, or `"pending"`.
        value: Its value, if known.
    """

    point: Point
    standing: Standing
    value: float | None = None


def observe(row: Trial) -> Seen:
    """A trial as the proposal sees it."""
    if row.value is not None:
        return Seen(row.point, "known", row.value)
    bad = row.state == "failed" and not is_retried(row)
    return Seen(row.point, "bad" if bad else "pending")


def cut_of(values: Sequence[float]) -> float:
    """The value above which a value only says that a point is bad.

    Example:
        >>> cut_of([1.0, 2.0, 3.0, 900.0])
        7.0
    """
    middle = statistics.median(values)
    return min(max(values), middle + _CUT * (middle - min(values)))


def known_values(seen: Sequence[Seen]) -> list[tuple[Point, float]]:
    """Points with values fit for a Gaussian process: outliers cut, failures as the worst.

    Example:
        >>> values = [1.0, 2.0, 3.0, 900.0]
        >>> rows = [Seen({}, "known", value) for value in values] + [Seen({}, "bad")]
        >>> [value for _, value in known_values(rows)]
        [1.0, 2.0, 3.0, 7.0, 7.0]
    """
    values = [s.value for s in seen if s.value is not None]
    if not values:
        return []
    cut = cut_of(values)
    return [
        (s.point, cut if s.value is None else min(s.value, cut))
        for s in seen
        if s.standing != "pending"
    ]
