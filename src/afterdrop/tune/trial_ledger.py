"""Who tries what: trials are given out, lost with their worker, and given out again.

A trial is leased to a worker, whose heart beats in the storage. A worker has died if its file of
life is free (seen at once, where folders are shared), or if its heart has not beaten for the time
of a lease, by the clock of who looks: clocks of hosts need not agree. Its trial fails with the
reason, and the same point is enqueued again, to be resumed from its checkpoint. All this and
proposing a point happens under one lock, so that no two workers get the same point. What must
follow a lost trial is derived from the storage and not remembered: any worker can die between any
two lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from afterdrop.tune.file_locks import is_dead
from afterdrop.tune.next_point import propose
from afterdrop.tune.observed_points import observe
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.study_settings import TuneSettings
from afterdrop.tune.trials import Trial, count, ends, is_retried, origin


class Ledger:
    """The trials of a study, as one worker sees and changes them.

    Args:
        backend: Where they are kept.
        settings: The study.
        worker: This worker's name.
        lease: Seconds without a heartbeat after which a worker counts as dead.
        proposes: Whether new points are proposed, or only what was enqueued is given out.
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
        self._beats: dict[int, tuple[Any, float]] = {}  # last seen beat, and when it was new

    def take(self, trials: int) -> Trial | None:
        """A trial to work on, or None if there is none now; others may still fail.

        Args:
            trials: How many points the study shall have.
        """
        with self.backend.exclusive():
            rows = self._without_dead(self.backend.trials())
            if not any(row.state == "waiting" for row in rows):
                if not self.proposes or count(rows).given >= trials:
                    return None
                point = propose(self.settings, [observe(row) for row in ends(rows)])
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
        """Ends a trial that went wrong, for good."""
        return self._finish(trial, "failed", None, {"reason": reason})

    def hand_back(self, trial: Trial, reason: str) -> None:
        """Gives a trial back, to be given out again from its checkpoint."""
        self._finish(trial, "failed", None, {"reason": reason, "lost": True, "handed_back": True})
        with self.backend.exclusive():
            self._requeue(self.backend.trials())

    def lose(self, trial: Trial, reason: str) -> None:
        """Gives up a trial of which this worker dies; it is given out again by who asks next."""
        self._finish(trial, "failed", None, {"reason": reason, "lost": True})

    @contextmanager
    def beating(self, trial: Trial) -> Iterator[None]:
        """Keeps the lease of a trial alive."""
        over = threading.Event()

        def beat() -> None:
            number = 0
            while not over.wait(self.lease / 4):
                number += 1
                try:
                    if not self.backend.note(trial.number, "beat", number):
                        return
                except Exception:  # a storage that is away for a moment: the next beat may reach it
                    continue

        heart = threading.Thread(target=beat, name=f"heart of trial {trial.number}", daemon=True)
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
        """Fails the trials of dead workers and enqueues them again; returns all trials anew."""
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
        if now - since < self.lease:
            return None
        return f"its worker {worker} gave no sign of life for {now - since:.0f} s"
