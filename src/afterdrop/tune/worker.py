"""A worker of a study: takes trials, trains and evaluates them, and then does the reruns.

`afterdrop tune` starts workers with

    python -m afterdrop.tune.worker < WORKPLACE.json

A signal stops a worker cleanly: its trial is saved and returned to the ledger.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from afterdrop.errors import AfterdropError
from afterdrop.file_locks import Alive
from afterdrop.plain_text import one_line
from afterdrop.stop_request import StopRequest, stop_request
from afterdrop.tune.checks import TuneError
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.reruns import enqueue_reruns
from afterdrop.tune.search_space import apply_point
from afterdrop.tune.storage_retries import retried
from afterdrop.tune.study_settings import TuneSettings
from afterdrop.tune.trial_ledger import Ledger
from afterdrop.tune.trial_training import TrialJob, run_trial
from afterdrop.tune.trials import Trial, count, ends, origin

_POLL = 1.0  # seconds between checks for trials that another worker may have lost
_FAILURES = 5  # this many failures without a success mean that the recipe itself is wrong
INTERRUPTED, BAD_INPUT = 130, 2


@dataclass(frozen=True)
class Workplace:
    """What a worker needs: the study, and options that may differ between hosts.

    Attributes:
        folder: The folder of the study on this host.
        storage: URL of the storage; None for the journal in the folder.
        name: The name of the study in the storage.
        trials: Total number of points of the study.
        top: Number of best trials to rerun.
        reruns: Number of reruns per trial, each with another seed.
        data: The folder of the named data sets.
        device: The device to train on.
        lease: Seconds without a heartbeat after which a worker counts as dead.
        threads: Number of torch threads; None for the default.
        parent: The worker stops when this process ends; None for no such process.
        quiet: Whether to print nothing.
    """

    folder: str
    storage: str | None
    name: str
    trials: int
    top: int = 3
    reruns: int = 2
    data: str | None = None
    device: str = "cpu"
    lease: float = 60.0
    threads: int | None = None
    parent: int | None = None
    quiet: bool = False

    def new_backend(self) -> Backend:
        """The storage of the study; fails at once if it is away, as its address may be wrong."""
        return Backend(Path(self.folder), self.storage, self.name)

    @retried
    def backend(self, part: str = "") -> Backend:
        """The storage of the study, or with the suffix `part` that of its reruns."""
        return Backend(Path(self.folder), self.storage, self.name + part)

    def to_json(self) -> str:
        """JSON for standard input, where a URL with a password is not visible to other users."""
        return json.dumps(asdict(self))


def work(place: Workplace) -> bool:
    """Works until the study is over; returns False if it was stopped before.

    Raises:
        TuneError: If no trial succeeds.
        AfterdropError: If the recipe, its data or the disk cannot be used; the trial is returned.
    """
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    backend = place.backend()
    settings = TuneSettings.from_dict(_require(backend.settings()))
    with Alive(backend.folder / "workers", name), stop_request() as request:
        worker = _Worker(place, settings, name, request)
        worker.finish(Ledger(backend, settings, name, place.lease), place.trials)
        if place.reruns and not worker.stopped():
            again = place.backend("-reruns")
            planned = enqueue_reruns(again, backend.trials(), place.top, place.reruns)
            ledger = Ledger(again, settings, name, place.lease, proposes=False)
            worker.finish(ledger, planned)
        return not worker.stopped()


class _Worker:
    def __init__(
        self, place: Workplace, settings: TuneSettings, name: str, request: StopRequest
    ) -> None:
        self.place, self.settings, self.name, self.request = place, settings, name, request
        self._gave_back = False  # training handles signals itself and returns the trial

    def stopped(self) -> bool:
        """Whether a signal arrived or the parent process has ended."""
        orphan = self.place.parent is not None and os.getppid() != self.place.parent
        return self._gave_back or self.request.signal is not None or orphan

    def finish(self, ledger: Ledger, trials: int) -> None:
        """Works on the trials of a ledger until all of them have ended."""
        while not self.stopped():
            rows = ledger.backend.trials()
            if count(rows).over(trials):
                return
            _require_success(rows)
            trial = ledger.take(trials)
            if trial is None:
                time.sleep(_POLL)
                continue
            with ledger.beating(trial):
                self._try(ledger, trial)

    def _try(self, ledger: Ledger, trial: Trial) -> None:
        place = self.place
        job = TrialJob(
            self._folder(trial), self._config(trial), place.device, self._data(), self.stopped
        )
        try:
            said = run_trial(job, ledger, trial)
        except AfterdropError as error:
            ledger.hand_back(trial, str(error))
            raise
        except Exception as error:
            ledger.lose(trial, f"{type(error).__name__}: {error}")
            raise
        self._gave_back = said is None
        if said is not None and not place.quiet:
            print(f"{job.folder.parent.name[:-1]} {job.folder.name}: {one_line(said)}", flush=True)

    def _data(self) -> Path | None:
        return None if self.place.data is None else Path(self.place.data)

    def _config(self, trial: Trial) -> Any:
        config = apply_point(self.settings.config, trial.point)
        if "seed" in trial.notes:
            config = config.override({"seed": trial.notes["seed"]})
        return config

    def _folder(self, trial: Trial) -> Path:
        if "of" in trial.notes:
            name = f"reruns/{trial.notes['of']:04d}-seed{trial.notes['seed']}"
        else:
            name = f"trials/{origin(trial):04d}"
        return Path(self.place.folder) / name


def _require(content: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if content is None:
        raise TuneError(
            "the study has no settings; start it with: afterdrop tune RECIPE --study STUDY"
        )
    return content


def _require_success(rows: list[Trial]) -> None:
    """Stops a study in which every trial fails."""
    points = ends(rows)
    failed = [row for row in points if row.state == "failed" and row.notes.get("reason")]
    if len(failed) >= _FAILURES and len(failed) == len(points):
        raise TuneError(
            f"all {len(failed)} trials failed, the last because: {failed[-1].notes['reason']}; "
            "correct the recipe or the ranges and start a new study"
        )


def main() -> int:
    """Runs a worker with the options read from standard input; returns the exit status."""
    place = Workplace(**json.loads(sys.stdin.read()))
    if place.threads is not None:
        torch.set_num_threads(place.threads)
    try:
        return 0 if work(place) else INTERRUPTED
    except AfterdropError as error:
        print(f"afterdrop: {one_line(error)}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
