"""The training loop: steps and validations, saved so that the process may be killed at any time.

Each validation writes its line of metrics, then the `best` checkpoint, then the `last` one; the
`last` one before it stays as `previous`. A process killed in between leaves either one line too
many, which resuming removes, or a `best` that will be written again. Where a checkpoint takes
seconds, not every validation writes one: at most 3 % of the time is spent on writing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from afterdrop.errors import FileError, RankLost
from afterdrop.stop_request import NAMES, StopRequest, stop_request
from afterdrop.train.checkpoint import Checkpoint, keep_copy, read_facts, write_checkpoint
from afterdrop.train.checks import DivergedError
from afterdrop.train.folder import RunFolder
from afterdrop.train.progress import Progress
from afterdrop.train.replicas import check_equal
from afterdrop.train.track import Tracker
from afterdrop.train.trainer import Trainer

Watch = Callable[[Mapping[str, Any]], str | None]
# Why a run stops early; if ranks have different reasons, the last one in this order counts.
REASONS = (None, "max_minutes", *NAMES)
# Steps and seconds between two readings of the loss, each of which waits for a GPU. Several ranks
# count steps only, because all of them must read the loss at the same step.
_READ_STEPS = 10
_READ_SECONDS = 0.2
_WRITE_SHARE = 0.03  # of the time may be spent on writing checkpoints
_MOVED = "put the folder back in its place, or name the new place, and "
_WRITE_QUICK = 0.5  # seconds; faster writes are never postponed


class Loop:
    """Trains until the schedule ends, the time is up, or a stop is requested.

    Args:
        trainer: The state of the run.
        folder: The run folder.
        progress: The progress bar.
        tracker: The TensorBoard writer, or None.
        deadline: The value of `time.monotonic` at which to stop, or None.
        watch: Called with each validation's line of metrics; a reason that it returns stops
            training.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: RunFolder,
        progress: Progress,
        tracker: Tracker | None = None,
        deadline: float | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.trainer, self.folder = trainer, folder
        self.progress, self.tracker, self.deadline = progress, tracker, deadline
        self.watch = watch
        self._lap, self._lap_steps = time.monotonic(), 0
        self._read_at = 0.0
        self._best: Checkpoint | None = None  # not written yet
        self._written, self._write_seconds = time.monotonic(), 0.0

    def run(self) -> str | None:
        """Trains; returns None when the run is finished, otherwise why it stopped.

        Raises:
            FileError: If the disk is full or cannot be written to.
            DivergedError: If the loss is not finite.
            RankLost: If another rank has ended. In all cases the last good checkpoint is kept.
        """
        with stop_request() as request:
            try:
                return self._run(request)
            except FileError as error:
                first = "make room and " if self.folder.path.exists() else _MOVED
                raise FileError(f"{error}. {self._how_to_resume(first)}") from error
            except DivergedError as error:
                raise DivergedError(f"{error}. {self._what_is_kept()}") from error
            except RankLost as error:
                raise RankLost(f"{error}. {self._how_to_resume()}") from error

    def _run(self, request: StopRequest) -> str | None:
        while self.trainer.schedule.stopped is None:
            late = self.deadline is not None and time.monotonic() >= self.deadline
            own = REASONS.index(request.signal or ("max_minutes" if late else None))
            if reason := REASONS[self.trainer.ranks.max(own)]:
                self._save()
                return reason
            if self.trainer.interval_done:
                if reason := self._validate(lambda: request.signal is not None):
                    return reason
            else:
                self._step()
        return None

    def _step(self) -> None:
        self.trainer.train_step()
        self._lap_steps += 1
        self.progress.step()
        if self.trainer.interval_steps % _READ_STEPS == 0 and self._read_due():
            loss = self.trainer.mean_loss()
            if loss is not None:
                self.progress.training(loss, self._speed())

    def _read_due(self) -> bool:
        now = time.monotonic()
        if self.trainer.ranks.count == 1 and now < self._read_at + _READ_SECONDS:
            return False
        self._read_at = now
        return True

    def _validate(self, stop: Callable[[], bool]) -> str | None:
        """Validates and saves; returns the reason to stop here if the watch gives one."""
        speed = self._speed()
        self.trainer.mean_loss()  # raises if training has diverged
        found = self.trainer.validate(stop)
        if found is None:
            return None
        line = self.trainer.finish_interval(found)
        check_equal(self.trainer.parameters, self.trainer.step, self.trainer.ranks)
        self._count_time()
        timed = {"seconds": self.trainer.seconds, "targets_per_second": speed}
        if self.trainer.ranks.first:
            self.folder.append_metrics(line | timed)
        if self.trainer.schedule.is_best:
            self._best = self.trainer.best_checkpoint(line)
        if self._write_due():
            self._write()
        elif self.trainer.schedule.is_best and self._best is not None:
            self._best = self._best.copy()  # because the weights will change
        self.progress.validated(found, self.trainer.schedule.best)
        if self.tracker is not None:
            self.tracker.add(line | timed)
        return self._watched(line | timed)

    def _watched(self, line: dict[str, Any]) -> str | None:
        """The reason of rank 0's watch to stop here, after saving; None to go on."""
        watch = self.watch
        if watch is None:
            return None
        reason = self.trainer.ranks.from_rank0(lambda: watch(line))
        if reason is None or self.trainer.schedule.stopped is not None:
            return None
        self._write()
        return reason

    def _save(self) -> None:
        self.trainer.mean_loss()  # raises instead of saving diverged weights
        self._count_time()
        self._write()

    def _write_due(self) -> bool:
        """Whether to write a checkpoint now, decided by rank 0; always at the end of a run."""
        if self.trainer.schedule.stopped is not None:
            return True
        due = self._write_seconds <= _WRITE_QUICK
        due |= (time.monotonic() - self._written) * _WRITE_SHARE >= self._write_seconds
        return bool(self.trainer.ranks.max(due and self.trainer.ranks.first))

    def _write(self) -> None:
        start = time.monotonic()
        captured = self.trainer.capture()  # all ranks take part in it
        if self.trainer.ranks.first:
            if self._best is not None:
                write_checkpoint(self.folder.best, self._best)
            keep_copy(self.folder.last, self.folder.previous)
            write_checkpoint(self.folder.last, captured)
        self._best = None
        self._written = time.monotonic()
        self._write_seconds = self._written - start

    def _speed(self) -> float:
        """Targets per second since the last validation."""
        elapsed = max(time.monotonic() - self._lap, 1e-9)
        return self._lap_steps * self.trainer.task.step_targets / elapsed

    def _count_time(self) -> None:
        now = time.monotonic()
        self.trainer.seconds += now - self._lap
        self._lap, self._lap_steps = now, 0

    def _what_is_kept(self) -> str:
        if not self.trainer.ranks.first:  # the folder may be on another host
            return f"Finished intervals are in {self.folder.path}."
        if not self.folder.path.exists():
            return f"The folder {self.folder.path} was moved or removed while it was trained in."
        if not self.folder.last.exists():
            return "There is no checkpoint yet."
        facts = read_facts(self.folder.last)
        return f"The last good checkpoint is {self.folder.last} (step {facts['step']})."

    def _how_to_resume(self, first: str = "") -> str:
        return f"{self._what_is_kept()} To continue, {first}run the same command again."
