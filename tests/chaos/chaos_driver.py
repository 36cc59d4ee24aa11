"""Kills and crashes work again and again, resumes it, and compares it with uninterrupted work.

    python chaos_driver.py MODE FOLDER COUNT

MODE is one of `test_chaos.COUNTS`. One process imports torch once and forks the work, so that a
killed process costs no import. Prints as JSON what happened; an assertion fails if one bit of a
result differs, if a file is left over, or if something that was kept is done again.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from chaos_points import CRASHED, at_each_point, choose_points, crash_at
from chaos_processes import ended, forked
from chaos_work import Work, evaluation, keep_at_once, training

from afterdrop.stop_request import NUMBERS


def uninterrupted(work: Work, folder: Path) -> tuple[float, list[str]]:
    """Does the work in FOLDER/whole, and once more for its duration and its crash points.

    The modules that the first one imports are then imported here, which later ones inherit.

    Returns:
        The seconds, and the names of the crash points.
    """
    notes = folder / "notes.json"

    def with_modules() -> None:
        work.action(folder / "whole")
        notes.write_text(json.dumps(list(sys.modules)))

    def with_points() -> None:
        names: list[str] = []
        at_each_point(names.append)
        work.action(folder / "timed")
        notes.write_text(json.dumps(names))

    assert ended(forked(with_modules)) == 0
    for name in json.loads(notes.read_text()):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    start = time.monotonic()
    assert ended(forked(with_points)) == 0
    return time.monotonic() - start, json.loads(notes.read_text())


def repeat_kills(
    work: Work, folder: Path, count: int, numbers: tuple[signal.Signals, ...] = (signal.SIGKILL,)
) -> dict[str, int]:
    """Sends signals at random times, at least `count` of them and until a run was resumed."""
    seconds, _ = uninterrupted(work, folder)
    rng, kills, run = random.Random(0), 0, 0
    while kills < count or not work.log.resumed():
        place, run = folder / f"run-{run}", run + 1
        kills += kill_until_done(partial(work.action, place), 1.2 * seconds, rng, numbers)
        work.same(place)
    return {"kills": kills, "resumed": work.check(), "runs": run}


def kill_until_done(
    action: Callable[[], object],
    longest: float,
    rng: random.Random,
    numbers: tuple[signal.Signals, ...],
) -> int:
    """Sends one of some signals after a random time, again and again until the action ends.

    Each must end with a status that says so to a shell. Returns how many ended it.
    """
    kills = 0
    while True:
        pid, number = forked(action), rng.choice(numbers)
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, number)
        status = ended(pid)
        if status == 0:
            return kills
        assert status in (-number, 128 + number), f"ended with {status} after {number.name}"
        kills += 1


def repeat_crashes(work: Work, folder: Path, count: int) -> dict[str, int]:
    """Crashes in each of `count` runs at one point or at three in a row, and then finishes it."""
    _, names = uninterrupted(work, folder)
    runs = choose_points(names, count)
    for run, points in enumerate(runs):
        place = folder / f"run-{run}"
        for point in points:
            status = ended(forked(partial(crash, work, place, point)))
            assert status == CRASHED, f"{points}: at {point} it ended with {status}"
        assert ended(forked(partial(work.action, place))) == 0, f"after crashes at {points}"
        work.same(place)
    crashes = sum(map(len, runs))
    return {"crashes": crashes, "resumed": work.check(), "runs": count, "points": len(names)}


def crash(work: Work, place: Path, point: int) -> None:
    """Begins or resumes the work in a folder, and crashes at a point."""
    crash_at(point)
    work.action(place)


def chaos(mode: str, folder: Path, count: int) -> dict[str, int]:
    """One kind of chaos; returns what happened."""
    if mode == "evaluation signals":  # finished batches are kept when one comes
        return repeat_kills(evaluation(folder), folder, count, NUMBERS)
    keep_at_once()
    if mode == "tuning kills":
        from chaos_study import tune_kills  # needs Optuna, unlike the rest

        return tune_kills(folder, count)
    work = training(folder) if mode.startswith("training") else evaluation(folder)
    return (repeat_kills if mode.endswith("kills") else repeat_crashes)(work, folder, count)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(chaos(sys.argv[1], Path(sys.argv[2]).resolve(), int(sys.argv[3]))))
