"""The points tried so far, as the proposal of the next point sees them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from afterdrop.tune.search_space import Point
from afterdrop.tune.trials import Trial, is_retried

Standing = Literal["known", "bad", "pending"]
# Values are clipped at the median plus this many times its distance to the best value. Above that,
# the exact value (a perplexity of thousands) would flatten the differences between good points.
_CUT = 3.0


class Seen(NamedTuple):
    """A point that was proposed before.

    Attributes:
        point: The point.
        standing: `"known"` if it has a value, `"bad"` if its training failed, or `"pending"`.
        value: The value, if known.
    """

    point: Point
    standing: Standing
    value: float | None = None


def observe(row: Trial) -> Seen:
    """The observation that a trial provides."""
    if row.value is not None:
        return Seen(row.point, "known", row.value)
    bad = row.state == "failed" and not is_retried(row)
    return Seen(row.point, "bad" if bad else "pending")


def cut_of(values: Sequence[float]) -> float:
    """The value at which outliers are clipped.

    Example:
        >>> cut_of([1.0, 2.0, 3.0, 900.0])
        7.0
    """
    middle = statistics.median(values)
    return min(max(values), middle + _CUT * (middle - min(values)))


def known_values(seen: Sequence[Seen]) -> list[tuple[Point, float]]:
    """Points and values for a Gaussian process: outliers clipped, failures as the worst value.

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
