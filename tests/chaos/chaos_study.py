"""A study whose workers are killed, and whose points are compared with trainings outside of it."""

import json
import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from chaos_log import WorkLog
from chaos_processes import ended, forked
from chaos_work import STEPS, metrics, note_steps, same_tensors, steps_kept, write_recipe

from afterdrop import train
from afterdrop.run_layout import RunLayout
from afterdrop.tune import trial_training
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.search_space import apply_point
from afterdrop.tune.study_runner import join_study
from afterdrop.tune.study_settings import TuneSettings, plan_study
from afterdrop.tune.trials import ATTEMPTS, Trial, ends, origin
from afterdrop.tune.worker import Workplace, work

INTERVALS = 8


def tune_kills(folder: Path, count: int) -> dict[str, int]:
    """Kills workers of a study at random times, at least `count` and until a trial was resumed.

    Kills beyond `count` are made while some training could be resumed.

    Every point must be complete in the end, no two may be equal, none may do kept steps again, and
    each must have the value, the curve and the weights of the same training outside of a study.
    """
    settings = plan_study(str(write_recipe(folder, INTERVALS)), prune=False)
    place = Workplace(
        str(folder / "study"), None, "study", trials=2 * count + 2, reruns=0, quiet=True
    )
    backend, log = place.backend(), WorkLog(folder / "work.log")
    join_study(backend, settings)
    kills, points = kill_workers(place, backend, log, count)
    log.check(INTERVALS * STEPS, STEPS)
    rows = ends(backend.trials())
    assert [row.state for row in rows] == ["complete"] * points
    assert len({json.dumps(row.point, sort_keys=True) for row in rows}) == points
    assert len(log.attempts()) == points
    for row in rows:
        check_point(settings, row, folder)
    return {"kills": kills, "resumed": log.resumed(), "points": points}


def kill_workers(place: Workplace, backend: Backend, log: WorkLog, count: int) -> tuple[int, int]:
    """Kills one of two workers at a time and starts another; returns the kills and points.

    If a worker finds that all points are complete, the next ones have two more points to do.
    """
    rng, kills = random.Random(1), 0
    crew = [forked(partial(logged_work, place, log)) for _ in range(2)]
    while kills < count or not log.resumed():
        time.sleep(rng.uniform(0.05, 1.0))
        at = rng.randrange(2)
        if kills >= count:
            wait_for_kept_steps(log)
        if not stopped(crew[at]):
            place = replace(place, trials=place.trials + 2)
        elif on_last_attempt(backend, crew[at]):
            os.kill(crew[at], signal.SIGCONT)
            continue
        else:
            os.kill(crew[at], signal.SIGKILL)
            assert ended(crew[at]) == -signal.SIGKILL
            kills += 1
        crew[at] = forked(partial(logged_work, place, log))
    assert [ended(pid) for pid in crew] == [0, 0]
    return kills, place.trials


def wait_for_kept_steps(log: WorkLog) -> None:
    """Waits, for two seconds at most, until some training has kept steps and others left to do."""
    for _ in range(200):
        last = [attempts[-1] for attempts in log.attempts().values()]
        if any(STEPS < each.kept + len(each.begun) < INTERVALS * STEPS for each in last):
            return
        time.sleep(0.01)


def logged_work(place: Workplace, log: WorkLog) -> None:
    """What a worker does, with a note of each training and of its steps."""

    def run(config: train.TrainConfig, folder: Path, **options: object) -> train.TrainResult:
        log.start(folder, steps_kept(folder))
        return train.run(config, folder, **options)

    note_steps(log)
    trial_training.run_training = run
    assert work(place)


def stopped(pid: int) -> bool:
    """Stops a worker, so that what it is doing does not change; False if it has finished."""
    os.kill(pid, signal.SIGSTOP)
    status = os.waitpid(pid, os.WUNTRACED)[1]
    assert os.WIFSTOPPED(status) or status == 0, f"a worker ended with {status}"
    return os.WIFSTOPPED(status)


def on_last_attempt(backend: Backend, pid: int) -> bool:
    """Whether a worker has a point that lost its workers before: once more, and it is given up."""
    last = [
        trial.notes.get("worker")
        for trial in backend.trials()
        if trial.state == "running" and trial.notes.get("attempt", 1) >= ATTEMPTS
    ]
    return any(worker is None or worker.split("-")[-2] == str(pid) for worker in last)


def check_point(settings: TuneSettings, row: Trial, folder: Path) -> None:
    """Compares a point with the same training outside of the study."""
    name = f"{origin(row):04d}"
    alone, trial = folder / "alone" / name, folder / "study" / "trials" / name
    config = apply_point(settings.config, row.point)
    train.run(config, alone, device="cpu", progress=False)
    curve = {line["interval"]: line["xe_optimal"] for line in metrics(alone)}
    assert row.curve == curve, f"point {name} has {row.curve}, not {curve}"
    same_tensors(RunLayout(trial), RunLayout(alone), "best")
    value = settings.objective.of_run(alone, "cpu", None).xe
    assert row.value == value, f"point {name} has {row.value}, not {value}"
