"""The result of a study: its trials, and the ranking of the best configurations.

The lowest of many noisy values is biased downwards by about the size of the noise (the author of
the paper saw 0.7 perplexity points). Reruns are not selected by their own value, so their mean has
no such bias: the ranking uses them alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from afterdrop.tune.search_space import Point
from afterdrop.tune.study_settings import TuneSettings
from afterdrop.tune.trials import Trial, ends, origin


@dataclass(frozen=True)
class Ranked:
    """A configuration in the ranking.

    Attributes:
        number: The number of its trial.
        point: The point of the configuration.
        tuned: The XE of its trial.
        reruns: The XE of its reruns with other seeds.

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
        """Mean over the reruns, or the XE of the trial if there are none."""
        return statistics.fmean(self.reruns) if self.reruns else self.tuned

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for fewer than two reruns."""
        if len(self.reruns) < 2:
            return None
        return statistics.stdev(self.reruns) / math.sqrt(len(self.reruns))


def best_trials(rows: Sequence[Trial], top: int) -> list[Trial]:
    """The complete trials with the lowest values."""
    complete = [row for row in ends(rows) if row.state == "complete" and row.value is not None]
    return sorted(complete, key=lambda row: (row.value or 0.0, row.number))[:top]


@dataclass(frozen=True)
class StudyResult:
    """A finished study.

    Attributes:
        settings: The settings of the study.
        trials: All trials, including lost ones.
        reruns: The trials that reran the best configurations.
        ranking: The best configurations, best first.
    """

    settings: TuneSettings
    trials: list[Trial]
    reruns: list[Trial]
    ranking: list[Ranked]


def rank(rows: Sequence[Trial], reruns: Sequence[Trial], top: int) -> list[Ranked]:
    """Ranks the best configurations by the mean of their reruns where there are any.

    Args:
        rows: The trials of the study.
        reruns: The trials of its reruns.
        top: Number of configurations to rank without reruns; all with reruns are ranked.
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
