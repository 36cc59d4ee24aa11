"""The best trials again, under other seeds: a tuner's best is a lucky draw.

The lowest of many noisy values is too low by about what the noise is (the author of the paper saw
0.7 perplexity points). Reruns are not chosen by their own value, so their mean has no such bias:
the ranking uses them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.study_result import best_trials
from afterdrop.tune.trials import Trial, count, origin

_FIRST_SEED = 1001  # far from what recipes use, so that no rerun repeats a trial


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
