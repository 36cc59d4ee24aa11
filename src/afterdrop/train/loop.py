"""The loop: turns of validation and steps, saved so that the process may die at any moment.

Order of what a turn writes: its line of metrics, the `last` checkpoint, the `best` one. A death in
between leaves a line too many, which resuming drops, or an old `best`, which resuming renews.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from afterdrop.errors import FileError
from afterdrop.train.checkpoint import read_facts, write_checkpoint
from afterdrop.train.checks import DivergedError
from afterdrop.train.folder import RunFolder
from afterdrop.train.interrupt import StopRequest, stop_request
from afterdrop.train.progress import Progress
from afterdrop.train.track import Tracker
from afterdrop.train.trainer import Trainer

Watch = Callable[[Mapping[str, Any]], str | None]
_LOOK_EVERY = 10  # steps between two looks at the loss, which on a GPU wait for it


class Loop:
    """Trains until the schedule, the clock or someone says stop.

    Args:
        trainer: The run's state in memory.
        folder: Its folder.
        progress: Its bar.
        tracker: Its TensorBoard, or None.
        deadline: The time (of `time.monotonic`) to stop at, or None.
        watch: Sees each turn's line of metrics; stops training by returning why.
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

    def run(self) -> str | None:
        """Trains; returns None when the run is finished, else why it stopped.

        Raises:
            FileError: If the disk is full or cannot be written; the last good checkpoint stays.
            DivergedError: If the loss is not finite; the last good checkpoint stays.
        """
        with stop_request() as request:
            try:
                return self._run(request)
            except FileError as error:
                raise FileError(f"{error}. {self._how_to_go_on()}") from error
            except DivergedError as error:
                raise DivergedError(f"{error}. {self._what_is_left()}") from error

    def _run(self, request: StopRequest) -> str | None:
        self._renew_best()
        while self.trainer.schedule.stopped is None:
            late = self.deadline is not None and time.monotonic() >= self.deadline
            if reason := request.signal or ("max_minutes" if late else None):
                self._save()
                return reason
            if self.trainer.turn_over:
                if reason := self._turn(lambda: request.signal is not None):
                    return reason
            else:
                self._step()
        return None

    def _step(self) -> None:
        self.trainer.train_step()
        self._lap_steps += 1
        self.progress.step()
        if self.trainer.turn_steps % _LOOK_EVERY == 0:
            loss = self.trainer.mean_loss()
            if loss is not None:
                self.progress.training(loss, self._speed())

    def _turn(self, stop: Callable[[], bool]) -> str | None:
        """Validates and saves; returns why to stop here, if the watch says so."""
        speed = self._speed()
        self.trainer.mean_loss()  # diverged weights need no validation
        found = self.trainer.validate(stop)
        if found is None:
            return None
        line = self.trainer.finish_turn(found)
        self._count_time()
        timed = {"seconds": self.trainer.seconds, "targets_per_second": speed}
        self.folder.append_metrics(line | timed)
        write_checkpoint(self.folder.last, self.trainer.capture())
        if self.trainer.schedule.is_best:
            write_checkpoint(self.folder.best, self.trainer.best_checkpoint(line))
        self.progress.validated(found, self.trainer.schedule.best)
        if self.tracker is not None:
            self.tracker.add(line | timed)
        reason = None if self.watch is None else self.watch(line | timed)
        return reason if self.trainer.schedule.stopped is None else None

    def _save(self) -> None:
        self.trainer.mean_loss()  # refuses to save what has diverged
        self._count_time()
        write_checkpoint(self.folder.last, self.trainer.capture())

    def _renew_best(self) -> None:
        """Writes `best` again where a run died after `last` and before it."""
        schedule = self.trainer.schedule
        if schedule.turn < 0 or not schedule.is_best or self.trainer.turn_steps > 0:
            return
        if not self.folder.best.exists() or read_facts(self.folder.best)["turn"] != schedule.turn:
            line = self.folder.read_metrics()[-1]
            write_checkpoint(self.folder.best, self.trainer.best_checkpoint(_untimed(line)))

    def _speed(self) -> float:
        """Targets a second since the last turn ended."""
        elapsed = max(time.monotonic() - self._lap, 1e-9)
        return self._lap_steps * self.trainer.task.step_targets / elapsed

    def _count_time(self) -> None:
        now = time.monotonic()
        self.trainer.seconds += now - self._lap
        self._lap, self._lap_steps = now, 0

    def _what_is_left(self) -> str:
        if not self.folder.last.exists():
            return "There is no checkpoint yet."
        facts = read_facts(self.folder.last)
        return f"The last good checkpoint is {self.folder.last} (step {facts['step']})."

    def _how_to_go_on(self) -> str:
        return (
            f"{self._what_is_left()} To go on, make room and give the same command again: "
            "it resumes from there."
        )


def _untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k not in ("seconds", "targets_per_second")}
