"""Runs a study: starts, monitors and stops the workers, and collects the result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from afterdrop.stop_request import resumable, stop_request
from afterdrop.train.checks import check_count
from afterdrop.train.device import choose_device
from afterdrop.tune.checks import TuneError
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.storage_retries import retried
from afterdrop.tune.study_result import StudyResult, rank
from afterdrop.tune.study_settings import TuneSettings
from afterdrop.tune.trials import Trial
from afterdrop.tune.worker import BAD_INPUT, INTERRUPTED, Workplace, work

_MOST_WORKERS = 64  # or four per core: each is a process that imports torch
_REPLACEMENTS = 3  # restarts per worker that was killed


def run_study(
    settings: TuneSettings,
    folder: str | Path,
    *,
    trials: int = 60,
    workers: int = 1,
    storage: str | None = None,
    name: str | None = None,
    top: int = 3,
    reruns: int = 2,
    data: str | Path | None = None,
    devices: Sequence[str] = (),
    lease: float = 60.0,
    quiet: bool = False,
) -> StudyResult:
    """Runs a study, or resumes it if the folder or storage already contains it.

    Args:
        settings: The settings of the study.
        folder: Its folder on this host, for the journal and the run folders of the trials.
        trials: Total number of points to try.
        workers: Processes on this host; a single worker runs in this process. Other hosts join with
            the same call and a shared folder or storage.
        storage: None for a journal file in the folder; or `sqlite:///FILE`, `postgresql://...`.
        name: The name of the study in the storage; by default that of the folder.
        top: Number of best trials to rerun.
        reruns: Number of reruns per trial, each with another seed; may be 0.
        data: The folder of the named data sets.
        devices: The devices to train on, assigned to workers in turn; by default a GPU if any.
        lease: Seconds without a heartbeat after which a worker on another host counts as dead.
        quiet: Whether to print nothing.

    Raises:
        TuneError: If the storage contains another study of that name, all workers failed, or no
            trial succeeded.
        StopSignal: After Ctrl-C, SIGTERM or SIGHUP, once all workers have saved their trials.

    Example:
        >>> import tempfile
        >>> from afterdrop.tune.study_settings import plan_study
        >>> settings = plan_study("digits-mlp", intervals=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = run_study(settings, folder, trials=2, reruns=0, quiet=True)
        >>> len(result.ranking)
        2
    """
    least = {"trials": (trials, 1), "workers": (workers, 1), "top": (top, 1), "reruns": (reruns, 0)}
    for what, (number, lowest) in least.items():
        check_count(what, number, least=lowest)
    most = max(_MOST_WORKERS, 4 * _cores())
    if workers > most:
        raise TuneError(f"workers={workers} are too many processes for this host; at most {most}")
    folder = Path(folder)
    place = Workplace(
        str(folder),
        storage,
        name or folder.resolve().name,
        trials,
        top,
        reruns,
        None if data is None else str(data),
        lease=lease,
        quiet=quiet,
    )
    backend = place.new_backend()
    join_study(backend, settings)
    where = [str(choose_device(name)) for name in (devices or (None,))]
    if workers == 1:
        with stop_request() as request:
            finished = work(replace(place, device=where[0]))
        if not finished:
            raise resumable(request.signal or "SIGINT")
    else:
        _run_workers(place, where, workers)
    return _result(settings, backend.trials(), place.backend("-reruns").trials(), top)


def _result(settings: TuneSettings, rows: list[Trial], again: list[Trial], top: int) -> StudyResult:
    ranking = rank(rows, again, top)
    if not ranking:
        reason = rows[-1].notes.get("reason", rows[-1].state)
        raise TuneError(
            f"none of {len(rows)} trials is complete; the last one ended because: {reason}. "
            "Correct the recipe or increase --trials."
        )
    return StudyResult(settings, rows, again, ranking)


@retried
def join_study(backend: Backend, settings: TuneSettings) -> None:
    """Stores the settings of a new study, or checks that they are those of the existing one."""
    with backend.exclusive():
        there = backend.settings()
        if there is None:
            backend.write_settings(settings.to_dict())
            return
    mine = settings.to_dict()
    differing = _differences(there, mine)
    if differing:
        raise TuneError(
            f"the study {backend.name!r} of {backend.folder} already exists with other settings "
            f"(stored → given): {'; '.join(differing[:5])}. Use another folder or name, or the "
            "settings of that study."
        )


def _differences(there: Any, now: Any, name: str = "") -> list[str]:
    if isinstance(there, dict) and isinstance(now, dict):
        keys = [*there, *(key for key in now if key not in there)]
        return [
            text
            for key in keys
            for text in _differences(there.get(key), now.get(key), f"{name}.{key}".strip("."))
        ]
    if isinstance(there, list | tuple) and isinstance(now, list | tuple) and len(there) == len(now):
        pairs = enumerate(zip(there, now))
        return [text for i, pair in pairs for text in _differences(*pair, f"{name}[{i}]")]
    return [] if there == now else [f"{name}: {there!r} → {now!r}"]


def _run_workers(place: Workplace, devices: Sequence[str], workers: int) -> None:
    """Keeps the workers running until the study is over; forwards a stop request once."""
    threads = None if "OMP_NUM_THREADS" in os.environ else _cores() // workers or 1
    place = replace(place, threads=threads, parent=os.getpid())
    left = _REPLACEMENTS * workers
    crew: dict[int, subprocess.Popen[str]] = {}
    with stop_request() as request:
        for index in range(workers):
            crew[index] = _start(replace(place, device=devices[index % len(devices)]))
        stopping, ended = False, []
        while crew:
            if request.signal is not None and not stopping:
                stopping = True
                for process in crew.values():
                    process.send_signal(signal.SIGTERM)
            for index, process in list(crew.items()):
                status = process.poll()
                if status is None:
                    continue
                del crew[index]
                ended.append(status)
                if status not in (0, INTERRUPTED, BAD_INPUT) and not stopping and left:
                    left -= 1
                    crew[index] = _start(replace(place, device=devices[index % len(devices)]))
            time.sleep(0.1)
    if request.signal is not None:
        raise resumable(request.signal)
    if 0 not in ended:
        raise TuneError(
            f"no worker finished (exit statuses {', '.join(map(str, ended))}); finished trials are "
            "kept. Fix the errors above and run the same command again."
        )


def _start(place: Workplace) -> subprocess.Popen[str]:
    """Starts a worker in its own session, so that Ctrl-C reaches it once, through this process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "afterdrop.tune.worker"],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(place.to_json())
    process.stdin.close()
    return process


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
