"""Reruns of the best trials with other seeds, because the best value of a study is partly luck."""

from __future__ import annotations

from collections.abc import Sequence

from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.storage_retries import retried
from afterdrop.tune.study_result import best_trials
from afterdrop.tune.trials import Trial, count, origin

_FIRST_SEED = 1001  # far from the seeds of recipes, so that a rerun never repeats a trial


@retried
def enqueue_reruns(again: Backend, rows: Sequence[Trial], top: int, reruns: int) -> int:
    """Enqueues the missing reruns and returns their total number.

    Args:
        again: The storage of the reruns.
        rows: The trials of the study, which have all ended.
        top: Number of best trials to rerun.
        reruns: Number of reruns per trial, each with another seed.
    """
    with again.exclusive():
        there = {(row.notes["of"], row.notes["seed"]) for row in again.trials()}
        for row in best_trials(rows, top):
            for seed in range(_FIRST_SEED, _FIRST_SEED + reruns):
                if (origin(row), seed) not in there:
                    again.enqueue(row.point, {"of": origin(row), "seed": seed})
        return count(again.trials()).given
