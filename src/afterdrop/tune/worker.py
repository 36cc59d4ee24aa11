"""A worker: takes trials of a study, trains them, tells what they are worth; then the reruns.

    python -m afterdrop.tune.worker < WORKPLACE.json

is how `afterdrop tune` starts one. A signal ends it cleanly: the trial is saved and given back.
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
from afterdrop.train.interrupt import StopRequest, stop_request
from afterdrop.tune.checks import TuneError
from afterdrop.tune.file_locks import Alive
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.reruns import enqueue_reruns
from afterdrop.tune.search_space import apply_point
from afterdrop.tune.study_settings import TuneSettings
from afterdrop.tune.trial_ledger import Ledger
from afterdrop.tune.trial_training import TrialJob, run_trial
from afterdrop.tune.trials import Trial, count, ends, origin

_POLL = 1.0  # seconds between two looks for a trial that another worker may have lost
_HOPELESS_STUDY = 5  # so many failures and nothing else: the recipe is wrong, not the points
INTERRUPTED, BAD_INPUT = 130, 2


@dataclass(frozen=True)
class Workplace:
    """Where a worker works: a study, and what may differ between the hosts that share it.

    Attributes:
        folder: The study's folder on this host.
        storage: URL of the storage; None is the journal in the folder.
        name: The study's name in the storage.
        trials: How many points the study shall have.
        top: How many of the best are run again.
        reruns: With how many other seeds.
        data: The folder of the named data sets.
        device: Where to train.
        lease: Seconds without a sign of life after which a worker counts as dead.
        threads: Threads of torch; None leaves them as they are.
        parent: The process without which this one stops; None is none.
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

    def backend(self, part: str = "") -> Backend:
        """The study's storage, or that of its reruns."""
        return Backend(Path(self.folder), self.storage, self.name + part)

    def to_json(self) -> str:
        """For the worker's standard input: a URL with a password is for nobody else to see."""
        return json.dumps(asdict(self))


def work(place: Workplace) -> bool:
    """Works until the study is over; False if a signal came before.

    Raises:
        TuneError: If no trial succeeds.
        AfterdropError: If the recipe, its data or the disk cannot be used; the trial is given back.
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
        self._gave_back = False  # a signal that came while training went to the training

    def stopped(self) -> bool:
        """Whether a signal came, or the process that started this one is gone."""
        orphan = self.place.parent is not None and os.getppid() != self.place.parent
        return self._gave_back or self.request.signal is not None or orphan

    def finish(self, ledger: Ledger, trials: int) -> None:
        """Works on one kind of trials until all have an end."""
        while not self.stopped():
            rows = ledger.backend.trials()
            if count(rows).over(trials):
                return
            _require_hope(rows)
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
            print(f"{job.folder.parent.name[:-1]} {job.folder.name}: {said}", flush=True)

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
        raise TuneError("the study has no settings; start it with: afterdrop tune RECIPE --study S")
    return content


def _require_hope(rows: list[Trial]) -> None:
    """Refuses to go on where every trial fails."""
    points = ends(rows)
    failed = [row for row in points if row.state == "failed" and row.notes.get("reason")]
    if len(failed) >= _HOPELESS_STUDY and len(failed) == len(points):
        raise TuneError(
            f"all {len(failed)} trials failed, the last because: {failed[-1].notes['reason']}; "
            "correct the recipe or the ranges and start a new study"
        )


def main() -> int:
    """Runs the worker of a workplace that comes on standard input; returns the exit status."""
    place = Workplace(**json.loads(sys.stdin.read()))
    if place.threads is not None:
        torch.set_num_threads(place.threads)
    try:
        return 0 if work(place) else INTERRUPTED
    except AfterdropError as error:
        print(f"afterdrop: {error}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
