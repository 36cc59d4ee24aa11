"""The best trials again, under other seeds: a tuner's best is a lucky draw.

The lowest of many noisy values is too low by about what the noise is (the author of the paper saw
0.7 perplexity points). Reruns are not chosen by their own value, so their mean has no such bias:
the ranking uses them alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from afterdrop.tune.optuna_backend import Backend, Trial
from afterdrop.tune.search_space import Point
from afterdrop.tune.trial_ledger import count, ends, origin

_FIRST_SEED = 1001  # far from what recipes use, so that no rerun repeats a trial


@dataclass(frozen=True)
class Ranked:
    """A configuration in the ranking.

    Attributes:
        number: The trial in which it was tried.
        point: The configuration's point.
        tuned: The XE that the tuner saw.
        reruns: XE under other seeds.

    Example:
        >>> row = Ranked(3, {}, 4.10, (4.12, 4.16))
        >>> f"{row.mean:.2f} ± {row.error:.2f}"
        '4.14 ± 0.02'
    """

    number: int
    point: Point
    tuned: float
    reruns: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Mean over the reruns; the tuner's value if there are none."""
        return statistics.fmean(self.reruns) if self.reruns else self.tuned

    @property
    def error(self) -> float | None:
        """Standard error of that mean; None below two reruns."""
        if len(self.reruns) < 2:
            return None
        return statistics.stdev(self.reruns) / math.sqrt(len(self.reruns))


def best_trials(rows: Sequence[Trial], top: int) -> list[Trial]:
    """The complete trials with the lowest values."""
    complete = [row for row in ends(rows) if row.state == "complete" and row.value is not None]
    return sorted(complete, key=lambda row: (row.value or 0.0, row.number))[:top]


def enqueue_reruns(again: Backend, rows: Sequence[Trial], top: int, reruns: int) -> int:
    """Enqueues the reruns that are not there yet; returns how many there are in all.

    Args:
        again: The storage of the reruns.
        rows: The trials of the study, all ended.
        top: How many of the best to run again.
        reruns: With how many seeds.
    """
    with again.exclusive():
        there = {(row.notes["of"], row.notes["seed"]) for row in again.trials()}
        for row in best_trials(rows, top):
            for seed in range(_FIRST_SEED, _FIRST_SEED + reruns):
                if (origin(row), seed) not in there:
                    again.enqueue(row.point, {"of": origin(row), "seed": seed})
        return count(again.trials()).given


def rank(rows: Sequence[Trial], reruns: Sequence[Trial], top: int) -> list[Ranked]:
    """The best configurations, by the mean of their reruns where there are any.

    Args:
        rows: The trials of the study.
        reruns: The trials of its reruns.
        top: How many to rank without reruns; all that have reruns are ranked.
    """
    by_trial: dict[int, list[float]] = {}
    for row in ends(reruns):
        if row.value is not None:
            by_trial.setdefault(row.notes["of"], []).append(row.value)
    complete = best_trials(rows, len(rows))
    ranked = [
        Ranked(
            origin(row), row.point, float(row.value or 0.0), tuple(by_trial.get(origin(row), ()))
        )
        for place, row in enumerate(complete)
        if place < top or origin(row) in by_trial
    ]
    return sorted(ranked, key=lambda row: (not row.reruns, row.mean))
