"""The ledger on real storages: which worker gets which trial, and the trials of dead workers."""

import subprocess
import sys
import time

import pytest

from afterdrop.file_locks import Alive, file_lock, is_dead
from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.trial_ledger import Ledger
from afterdrop.tune.trials import ATTEMPTS, count, ends, is_retried, origin

# One process imports torch once and forks the workers, which take points at the same time without
# reporting results, so that only the lock and the pending trials keep the points distinct.
RACERS = """
import os, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from afterdrop.tune.optuna_backend import Backend, gp_point
from afterdrop.tune.trial_ledger import Ledger
from afterdrop.tune.study_runner import join_study
from afterdrop.tune.study_settings import plan_study

folder, storage, name, recipe = sys.argv[1:]
storage = storage or None
space = plan_study(recipe).space
middle = space.point([0.5] * len(space))
gp_point(space, [(middle, 1.0), (middle, 2.0)], [], 1)  # does the lazy imports before the race
go, ready = os.pipe()
children = []
for index in range(3):
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        settings = plan_study(recipe)
        backend = Backend(Path(folder), storage, name)  # all workers create the study at once
        join_study(backend, settings)
        ledger = Ledger(backend, settings, f"racer{index}")
        os.read(go, 1)  # all workers start when the parent closes the pipe
        for _ in range(3):
            trial = ledger.take(100)
            ledger.complete(trial, trial.number / 10) if trial.number < 6 else None
        os._exit(0)
    children.append(pid)
os.close(ready)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""


@pytest.fixture
def open_ledger(tmp_path, storage, name, settings):
    def make(worker: str, **others) -> Ledger:
        backend = Backend(tmp_path / "study", storage, name)
        return Ledger(backend, settings, worker, **others)

    return make


@pytest.mark.subprocess
def test_concurrent_workers_never_get_the_same_point(tmp_path, storage, name, recipe):
    study = tmp_path / "study"
    arguments = [str(study), storage or "", name, str(recipe)]
    done = subprocess.run(
        [sys.executable, "-c", RACERS, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    rows = Backend(study, storage, name).trials()
    assert [row.number for row in rows] == list(range(9))
    assert len({tuple(row.point.values()) for row in rows}) == 9
    assert {row.notes["worker"] for row in rows} == {"racer0", "racer1", "racer2"}


def test_results_are_stored_and_counted(open_ledger):
    ledger = open_ledger("one")
    first, second = ledger.take(2), ledger.take(2)
    assert ledger.take(2) is None and count(ledger.backend.trials()).open == 2
    assert ledger.backend.report(first.number, 1, 5.5)
    assert ledger.complete(first, 4.25, temperature=1.1)
    assert ledger.fail(second, "diverged: the loss is nan")
    again = open_ledger("other").backend.trials()
    assert [(row.state, row.value) for row in again] == [("complete", 4.25), ("failed", None)]
    assert again[0].notes["temperature"] == 1.1 and again[0].curve == {1: 5.5}
    assert "nan" in again[1].notes["reason"]
    assert count(again).over(2) and not count(again).over(3)
    assert ledger.prune(ledger.take(3), 5.0)
    assert ledger.backend.trials()[2].value == 5.0


def test_a_dead_worker_loses_its_trial_at_once_where_its_file_is_seen(open_ledger):
    dead, other = open_ledger("dead"), open_ledger("other")
    with Alive(dead.backend.folder / "workers", "dead"):
        lost = dead.take(1)
        assert other.take(1) is None  # it is alive
    (dead.backend.folder / "workers" / "dead.alive").touch()  # a killed worker does not remove it
    again = other.take(1)
    assert again.point == lost.point and origin(again) == lost.number
    assert "dead died" in other.backend.trials()[lost.number].notes["reason"]


def test_a_silent_worker_loses_its_trial_after_the_lease(open_ledger):
    silent = open_ledger("elsewhere")
    watcher = open_ledger("watcher", lease=0.3)
    lost = silent.take(1)
    assert watcher.take(1) is None
    watcher.backend.note(lost.number, "beat", 1)
    time.sleep(0.35)
    assert watcher.take(1) is None  # there was a heartbeat since the last check
    time.sleep(0.35)
    again = watcher.take(1)
    assert again.point == lost.point
    assert "no heartbeat" in watcher.backend.trials()[lost.number].notes["reason"]
    # The worker was only slow: its results come too late and change nothing.
    assert not silent.complete(lost, 1.0)
    assert not silent.backend.report(lost.number, 9, 1.0)
    assert watcher.complete(again, 4.0)
    assert [row.value for row in ends(watcher.backend.trials())] == [4.0]


@pytest.mark.slow
def test_heartbeats_keep_the_trial(tmp_path, settings):
    worker, watcher = (
        Ledger(Backend(tmp_path, None, "s"), settings, name, lease=2.0) for name in "ab"
    )
    trial = worker.take(1)
    with worker.beating(trial):
        for _ in range(10):
            assert watcher.take(1) is None
            time.sleep(0.3)
    assert worker.complete(trial, 1.0)


def test_a_point_whose_workers_keep_dying_is_given_up(open_ledger):
    ledger = open_ledger("one")
    for _ in range(ATTEMPTS):
        trial = ledger.take(1)
        assert trial is not None
        ledger.lose(trial, "killed")
    assert ledger.take(1) is None
    rows = ledger.backend.trials()
    assert len(rows) == ATTEMPTS and count(rows).over(1)
    assert [is_retried(row) for row in rows] == [True] * (ATTEMPTS - 1) + [False]


def test_an_interrupted_trial_is_always_tried_again(open_ledger):
    ledger = open_ledger("one")
    points = []
    for _ in range(ATTEMPTS + 2):  # interruptions do not count as attempts
        trial = ledger.take(1)
        points.append(trial.point)
        ledger.hand_back(trial, "its worker was stopped (SIGINT)")
    assert points == [points[0]] * len(points)
    assert count(ledger.backend.trials()).open == 1


def test_a_worker_that_dies_between_failing_and_enqueueing_loses_nothing(open_ledger):
    ledger = open_ledger("one")
    lost = ledger.take(1)
    ledger.backend.note(lost.number, "lost", True)
    ledger.backend.finish(lost.number, "failed")  # the worker dies before enqueueing
    assert not count(ledger.backend.trials()).over(1)
    assert open_ledger("next").take(1).point == lost.point


def test_a_journal_line_cut_short_by_a_kill_is_dropped(tmp_path, settings):
    backend = Backend(tmp_path, None, "s")
    ledger = Ledger(backend, settings, "one")
    ledger.complete(ledger.take(5), 1.0)
    with open(tmp_path / "journal.log", "ab") as file:
        file.write(b'{"op_code": 6, "wor')
    fresh = Ledger(Backend(tmp_path, None, "s"), settings, "two")
    assert fresh.complete(fresh.take(5), 2.0)
    assert [row.value for row in Backend(tmp_path, None, "s").trials()] == [1.0, 2.0]


@pytest.mark.subprocess
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from afterdrop.file_locks import Alive, file_lock\n"
        "Alive(Path(sys.argv[1]), 'w').__enter__(); lock = file_lock(Path(sys.argv[1]) / 'l')\n"
        "lock.__enter__(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    assert is_dead(tmp_path, "w") is True
    assert is_dead(tmp_path, "nobody") is None
    waited = time.monotonic()
    with file_lock(tmp_path / "l"):
        assert time.monotonic() - waited < 5
