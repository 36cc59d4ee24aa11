"""Assigns trials to workers, and reassigns the trials of workers that died.

A trial is leased to a worker, which stores a heartbeat. A worker counts as dead if the lock on its
file is free (detected at once where the folder is shared), or if there was no new heartbeat for the
duration of a lease, measured by the clock of the observer because clocks of hosts may differ. Its
trial fails with the reason, and the same point is enqueued again, to be resumed from its
checkpoint. This and proposing a point happen under one lock, so that no two workers get the same
point. Which trials must be enqueued again is derived from the storage and never remembered, because
a worker can die between any two statements.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from afterdrop.file_locks import is_dead
from afterdrop.tune.next_point import propose
from afterdrop.tune.observed_points import observe
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.storage_retries import no_retries, retried
from afterdrop.tune.study_settings import TuneSettings
from afterdrop.tune.trials import Trial, count, ends, is_retried, origin


class Ledger:
    """The trials of a study, as one worker sees and changes them.

    Args:
        backend: The storage of the trials.
        settings: The settings of the study.
        worker: The name of this worker.
        lease: Seconds without a heartbeat after which a worker counts as dead.
        proposes: Whether to propose new points, instead of only taking enqueued ones.
    """

    def __init__(
        self,
        backend: Backend,
        settings: TuneSettings,
        worker: str,
        lease: float = 60.0,
        *,
        proposes: bool = True,
    ) -> None:
        self.backend, self.settings, self.worker = backend, settings, worker
        self.lease, self.proposes = lease, proposes
        self._beats: dict[int, tuple[Any, float]] = {}  # last heartbeat, and when it was first seen

    @retried
    def take(self, trials: int) -> Trial | None:
        """A trial to work on, or None if there is none now; running ones may still be lost.

        Args:
            trials: Total number of points of the study.
        """
        with self.backend.exclusive() as confirm:
            rows = self._without_dead(self.backend.trials())
            if not any(row.state == "waiting" for row in rows):
                if not self.proposes or count(rows).given >= trials:
                    return None
                point = propose(self.settings, [observe(row) for row in ends(rows)])
                confirm()  # proposing takes long enough for a server to be restarted
                self.backend.enqueue(point, {})
            trial = self.backend.start(self.settings.space)
            self.backend.note(trial.number, "worker", self.worker)
            return trial

    def complete(self, trial: Trial, value: float, **notes: Any) -> bool:
        """Ends a trial with a value; False if it was lost to another worker."""
        return self._finish(trial, "complete", value, notes)

    def prune(self, trial: Trial, value: float, **notes: Any) -> bool:
        """Ends a trial that was stopped early; False if it was lost to another worker."""
        return self._finish(trial, "pruned", value, notes)

    def fail(self, trial: Trial, reason: str) -> bool:
        """Ends a trial that failed and is not tried again."""
        return self._finish(trial, "failed", None, {"reason": reason})

    def hand_back(self, trial: Trial, reason: str) -> None:
        """Returns a trial, to be resumed from its checkpoint by any worker."""
        self._finish(trial, "failed", None, {"reason": reason, "lost": True, "handed_back": True})
        self._requeue_lost()

    @retried
    def _requeue_lost(self) -> None:
        with self.backend.exclusive():
            self._requeue(self.backend.trials())

    def lose(self, trial: Trial, reason: str) -> None:
        """Ends a trial whose error ends this worker; another worker enqueues it again."""
        self._finish(trial, "failed", None, {"reason": reason, "lost": True})

    @contextmanager
    def beating(self, trial: Trial) -> Iterator[None]:
        """Stores heartbeats that keep the lease of a trial."""
        over = threading.Event()

        def beat() -> None:
            number = 0
            while not over.wait(self.lease / 4):
                number += 1
                try:
                    with no_retries():
                        if not self.backend.note(trial.number, "beat", number):
                            return
                except Exception:  # the storage may be reachable again at the next beat
                    continue

        heart = threading.Thread(
            target=beat, name=f"heartbeat of trial {trial.number}", daemon=True
        )
        heart.start()
        try:
            yield
        finally:
            over.set()
            heart.join()

    def _finish(self, trial: Trial, state: Any, value: float | None, notes: dict[str, Any]) -> bool:
        for name, note in notes.items():
            if not self.backend.note(trial.number, name, note):
                return False
        return self.backend.finish(trial.number, state, value)

    def _without_dead(self, rows: list[Trial]) -> list[Trial]:
        """Fails the trials of dead workers and enqueues them again; returns the updated trials."""
        for row in rows:
            reason = self._reason_of_death(row) if row.state == "running" else None
            if reason is not None:
                self.backend.note(row.number, "reason", reason)
                self.backend.note(row.number, "lost", True)
                self.backend.finish(row.number, "failed")
        self._requeue(self.backend.trials())
        return self.backend.trials()

    def _requeue(self, rows: Sequence[Trial]) -> None:
        again = {row.notes.get("retry_of") for row in rows}
        for row in rows:
            if is_retried(row) and row.number not in again:
                died = not row.notes.get("handed_back")
                notes = {
                    **{name: row.notes[name] for name in ("of", "seed") if name in row.notes},
                    "retry_of": row.number,
                    "origin": origin(row),
                    "attempt": row.notes.get("attempt", 1) + died,
                }
                self.backend.enqueue(row.point, notes)

    def _reason_of_death(self, row: Trial) -> str | None:
        worker = row.notes.get("worker")
        if worker is not None and is_dead(self.backend.folder / "workers", worker):
            return f"its worker {worker} died"
        now, beat = time.monotonic(), row.notes.get("beat")
        last, since = self._beats.get(row.number, (None, now))
        if row.number not in self._beats or last != beat:
            self._beats[row.number] = (beat, now)
            return None
        since = max(since, self.backend.away_at)  # while it was away, nobody could store a beat
        if now - since < self.lease:
            return None
        return f"its worker {worker} sent no heartbeat for {now - since:.0f} s"
