"""Trains the configuration of a trial, monitors it, and records the result in the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from afterdrop.errors import AfterdropError
from afterdrop.evaluation.chunks import out_of_memory
from afterdrop.stop_request import NAMES
from afterdrop.train import DivergedError, TrainConfig, TrainError, TrainResult
from afterdrop.train import run as run_training
from afterdrop.train.folder import RunFolder, locked
from afterdrop.tune.pruning import should_prune
from afterdrop.tune.trial_ledger import Ledger
from afterdrop.tune.trials import Trial, count, ends

_PRUNED, _STOPPED, _LOST = "pruned", "stopped", "lost"
_LEAST_MINUTES = 1e-3  # for a resumed trial without time left, which stops at its next check


@dataclass(frozen=True)
class TrialJob:
    """What to train for a trial, and where.

    Attributes:
        folder: The run folder; an existing checkpoint is resumed.
        config: The training configuration.
        device: The device to train on.
        data: The folder of the named data sets.
        stopped: Returns whether the worker was asked to stop.
    """

    folder: Path
    config: TrainConfig
    device: str
    data: Path | None
    stopped: Callable[[], bool]


def run_trial(job: TrialJob, ledger: Ledger, trial: Trial) -> str | None:
    """Trains and evaluates; returns a message, or None if the trial was returned to the ledger.

    Divergence and running out of memory end the trial with the reason. Other errors propagate.
    """
    try:
        result = _train(job, ledger, trial)
    except DivergedError as error:
        return _failed(ledger, trial, f"diverged: {error}")
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, AfterdropError) or not out_of_memory(error):
            raise
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return _failed(ledger, trial, f"out of memory: {str(error).splitlines()[0]}")
    if result.reason == _LOST:
        return "taken over by another worker; dropped here"
    if result.reason in (*NAMES, _STOPPED):
        ledger.hand_back(trial, f"its worker was stopped ({result.reason})")
        return None
    if not result.best:
        return _failed(ledger, trial, "its time limit was reached before the first validation")
    return _record(job, ledger, trial, result)


def _train(job: TrialJob, ledger: Ledger, trial: Trial) -> TrainResult:
    folder = _free_folder(job, trial)
    watch = _Watch(job, ledger, trial)
    for line in RunFolder(folder).read_metrics():  # from an earlier attempt
        watch.report(line)
    limit = ledger.settings.minutes
    if limit is not None:
        limit = max(limit - watch.seconds / 60, _LEAST_MINUTES)
    return run_training(
        job.config,
        folder,
        data=job.data,
        device=job.device,
        max_minutes=limit,
        progress=False,
        watch=watch,
    )


class _Watch:
    """Stores the result of each interval and decides when to stop."""

    def __init__(self, job: TrialJob, ledger: Ledger, trial: Trial) -> None:
        self.job, self.ledger, self.trial = job, ledger, trial
        self.curve: dict[int, float] = {}
        self.seconds = 0.0

    def report(self, line: Mapping[str, Any]) -> bool:
        """Adds an interval; False if the trial was taken over by another worker."""
        optimal = self.ledger.settings.objective.temperature == "optimal"
        xe = line["xe_optimal" if optimal else "xe"]
        self.curve[line["interval"]], self.seconds = xe, line["seconds"]
        return self.ledger.backend.report(self.trial.number, line["interval"], xe)

    def __call__(self, line: Mapping[str, Any]) -> str | None:
        if not self.report(line):
            return _LOST
        if self.job.stopped():
            return _STOPPED
        settings = self.ledger.settings
        if not settings.prune or not self.ledger.proposes:
            return None
        rows = ends(self.ledger.backend.trials())
        others = [r.curve for r in rows if r.state in ("complete", "pruned") and r.curve]
        return (
            _PRUNED
            if should_prune(self.curve, others, settings.config.schedule.intervals)
            else None
        )


def _record(job: TrialJob, ledger: Ledger, trial: Trial, result: TrainResult) -> str:
    best = result.best
    run = RunFolder(result.folder)
    notes: dict[str, Any] = {
        "interval": best["interval"],
        "xe_plain": best["xe"],
        "seconds": run.read_metrics()[-1]["seconds"],
        "parameters": run.read_config()[1]["parameters"],
        "ended": result.reason,
    }
    if result.reason == _PRUNED:
        value = best["xe_optimal" if job.config.validation.criterion == "optimal" else "xe"]
        recorded, prefix = ledger.prune(trial, value, **notes), "stopped early, "
    else:
        try:
            worth = ledger.settings.objective.of_run(result.folder, job.device, job.data)
        except AfterdropError as error:
            return _failed(ledger, trial, f"cannot be evaluated: {error}")
        value = worth.xe
        notes |= {"temperature": worth.temperature, "error": worth.error}
        recorded, prefix = ledger.complete(trial, value, **notes), ""
    if not recorded:
        return "taken over by another worker; dropped here"
    # The optimiser state is most of the bytes, and a finished trial does not need it.
    for path in (run.last, run.previous):
        path.unlink(missing_ok=True)
    known = [r.value for r in ledger.backend.trials() if r.value is not None]
    points = count(ledger.backend.trials())
    return (
        f"{prefix}xe {value:.4f} in {notes['seconds']:.0f} s; best {min(known):.4f} "
        f"of {points.given - points.open} done"
    )


def _failed(ledger: Ledger, trial: Trial, reason: str) -> str:
    ledger.fail(trial, reason)
    return f"failed: {reason}"


def _free_folder(job: TrialJob, trial: Trial) -> Path:
    """The folder of the job, or the first of others beside it that this training can use."""
    name, numbers = job.folder.name, itertools.count(trial.number)
    others = (job.folder.with_name(f"{name}-{number}") for number in numbers)
    return next(p for p in itertools.chain([job.folder], others) if _is_usable(p, job.config))


def _is_usable(folder: Path, config: TrainConfig) -> bool:
    """Whether a training can begin in a folder or resume from it.

    A worker that lost the trial may still be training there. Or a journal that lost lines does not
    know any more that the trial had ended and removed its last checkpoint, or that another point
    had the number of the trial.
    """
    try:
        with locked(folder) as run:
            return not run.check(config, "auto") or run.last.exists() or not run.best.exists()
    except TrainError:
        return False
