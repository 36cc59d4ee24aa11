"""Workers as real processes on real storages: killed, interrupted, orphaned, resumed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from afterdrop.tune.optuna_backend import Backend
from afterdrop.tune.study_runner import run_study
from afterdrop.tune.study_settings import plan_study
from afterdrop.tune.trials import Trial, ends, origin

INTERVALS = 60  # enough to kill a trial in the middle even on a busy machine
# One process imports torch once and forks the workers, which saves the import.
CREW = """
import os, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from afterdrop.tune.study_settings import plan_study
from afterdrop.tune.study_runner import join_study
from afterdrop.tune.worker import Workplace, work

mode, folder, storage, name, recipe, intervals = sys.argv[1:]
place = Workplace(folder, storage or None, name, trials=2, reruns=0, quiet=True)
join_study(place.backend(), plan_study(recipe, intervals=int(intervals), prune=False))

def worker(parent=None):
    from dataclasses import replace
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work(replace(place, parent=parent)) else 130)
    return pid

if mode == "two":
    statuses = [os.waitpid(pid, 0)[1] for pid in [worker(), worker()]]
    print(sorted(statuses))
else:
    worker(os.getpid())
    os.wait()
"""


def start_crew(mode: str, folder: Path, storage: str | None, name: str, recipe: Path):
    place = [str(folder), storage or "", name, str(recipe), str(INTERVALS)]
    command = [sys.executable, "-c", CREW, mode, *place]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_for(what: Callable[[], object], process: subprocess.Popen | None = None) -> object:
    for _ in range(1200):
        found = what()
        if found:
            return found
        assert process is None or process.poll() is None, "ended too early"
        time.sleep(0.05)
    raise AssertionError("nothing happened within a minute")


def intervals_done(folder: Path, number: int) -> list[str]:
    path = folder / "trials" / f"{number:04d}" / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def trained_a_bit(folder: Path, backend: Callable[[], Backend]) -> list[Trial]:
    """Running trials that have done a few intervals and have many left."""
    if not list(folder.glob("trials/*/metrics.jsonl")):
        return []
    running = [row for row in backend().trials() if row.state == "running"]
    return [r for r in running if 3 <= len(intervals_done(folder, origin(r))) < INTERVALS - 5]


def pid_of(trial: Trial) -> int:
    return int(trial.notes["worker"].split("-")[-2])


def alive(folder: Path) -> list[Path]:
    return list((folder / "workers").glob("*.alive"))


def test_the_trial_of_a_killed_worker_is_resumed_by_another(tmp_path, storage, name, recipe):
    folder = tmp_path / "study"
    crew = start_crew("two", folder, storage, name, recipe)

    def backend() -> Backend:
        return Backend(folder, storage, name)

    victim = wait_for(lambda: trained_a_bit(folder, backend), crew)[0]
    os.kill(pid_of(victim), signal.SIGKILL)
    before = intervals_done(folder, victim.number)[:2]  # the third may not have its checkpoint yet
    out, _ = crew.communicate(timeout=120)
    assert out.strip() == "[0, 9]"
    rows = backend().trials()
    assert rows[victim.number].state == "failed" and "died" in rows[victim.number].notes["reason"]
    retry = next(row for row in rows if row.notes.get("retry_of") == victim.number)
    assert retry.state == "complete" and retry.point == victim.point
    assert retry.notes["worker"] != victim.notes["worker"]
    # It was resumed and not restarted: the lines have their old times, and none is missing.
    lines = intervals_done(folder, victim.number)
    assert lines[:2] == before and len(lines) == INTERVALS + 1
    assert retry.curve.keys() == set(range(INTERVALS + 1))
    assert [row.state for row in ends(rows)] == ["complete"] * 2


def test_workers_stop_when_their_parent_process_ends(tmp_path, name, recipe):
    folder = tmp_path / "study"
    crew = start_crew("orphan", folder, None, name, recipe)
    wait_for(lambda: trained_a_bit(folder, lambda: Backend(folder, None, name)), crew)
    crew.kill()
    crew.communicate()
    wait_for(lambda: not alive(folder))
    last = Backend(folder, None, name).trials()[-1]
    assert last.state == "waiting" and "retry_of" in last.notes


def test_ctrl_c_stops_all_workers_and_the_study_can_be_resumed(tmp_path, recipe):
    folder = tmp_path / "study"
    options = ["--trials=40", "--workers=2", "--reruns=0", f"--intervals={INTERVALS}", "--no-prune"]
    command = [sys.executable, "-m", "afterdrop", "tune", str(recipe), f"--study={folder}"]
    process = subprocess.Popen(
        [*command, *options, "--device", "cpu"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )

    def running() -> list[Trial]:
        return trained_a_bit(folder, lambda: Backend(folder, None, "study"))

    victim = wait_for(running, process)[0]
    os.kill(pid_of(victim), signal.SIGKILL)  # the parent replaces it
    wait_for(
        lambda: len({r.notes["worker"] for r in running()} - {victim.notes["worker"]}), process
    )
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "run the same command to resume" in said, said
    assert "Traceback" not in said
    left = [path for path in alive(folder) if victim.notes["worker"] not in path.name]
    assert left == []
    points = ends(Backend(folder, None, "study").trials())
    # The trial of the killed worker may still be running; all others ended or were returned.
    others = [row for row in points if row.notes.get("worker") != victim.notes["worker"]]
    assert {row.state for row in others} - {"complete"} == {"waiting"}
    settings = plan_study(str(recipe), intervals=INTERVALS, prune=False)
    only_open = {"trials": len(points), "reruns": 0, "devices": ["cpu"], "quiet": True}
    result = run_study(settings, folder, **only_open)
    assert [row.state for row in ends(result.trials)] == ["complete"] * len(points)
    assert {len(intervals_done(folder, origin(row))) for row in ends(result.trials)} == {
        INTERVALS + 1
    }
