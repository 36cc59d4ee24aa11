"""Kills and crashes work again and again, resumes it, and compares it with work left alone.

    python chaos_driver.py MODE FOLDER COUNT

One process imports torch once and forks the work, so that a killed process costs no import. Prints
the number of kills or crash points as JSON; an assertion fails if one bit of a result differs.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from afterdrop import recipes, train
from afterdrop.cli import main
from afterdrop.evaluation import resume_store
from afterdrop.train.load_run import load_model
from afterdrop.tune.study_runner import join_study
from afterdrop.tune.study_settings import plan_study
from afterdrop.tune.trials import ATTEMPTS, ends
from afterdrop.tune.worker import Workplace, work

Action = Callable[[Path], object]
CRASHED = 77
RECIPE = """
[data]
name = {text!r}
[model]
hidden_sizes = [8]
input_dropout = 0.3
state_dropout = 0.3
[objective]
batch_size = 4
window = 6
[optimiser]
learning_rate = 0.005
[schedule]
steps_per_interval = 3
intervals = {intervals}
[averaging]
latest = 3
[validation]
stripes = 2
"""
MODULE = """
import time
import torch
from torch import nn

def load_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

def valid_batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        time.sleep(0.004)
        yield torch.randn(3, 4, generator=generator), torch.randint(3, (3,), generator=generator)
"""


def forked(action: Callable[[], object]) -> int:
    """Runs an action in a child process; returns its process number."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    """The status of a process once it has ended: negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def left_alone(action: Action, folder: Path) -> float:
    """Runs an action in FOLDER/whole, and once more to return the seconds that it takes.

    The modules that the first one imports are then imported here, which the others inherit.
    """

    def timed() -> None:
        action(folder / "timed")

    def noted() -> None:
        action(folder / "whole")
        (folder / "modules").write_text("\n".join(sys.modules))

    assert ended(forked(noted)) == 0
    for name in (folder / "modules").read_text().split("\n"):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    start = time.monotonic()
    assert ended(forked(timed)) == 0
    return time.monotonic() - start


def kill_until_done(action: Callable[[], object], longest: float, rng: random.Random) -> int:
    """Kills the action after random times and starts it again until it ends; counts the kills."""
    kills = 0
    while True:
        pid = forked(action)
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        status = ended(pid)
        if status == 0:
            return kills
        assert status == -signal.SIGKILL, f"ended with {status}"
        kills += 1


def crash_at(point: int) -> None:
    """Ends this process at the given call of what makes a write durable, before or after it."""
    calls = 0

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 2
            if calls - 1 == point:
                os._exit(CRASHED)
            result = real(*arguments, **options)
            if calls == point:
                os._exit(CRASHED)
            return result

        return call

    os.fsync, os.replace, os.unlink = dying(os.fsync), dying(os.replace), dying(os.unlink)
    tempfile.mkstemp = dying(tempfile.mkstemp)


def crash_everywhere(action: Callable[[Path], object], folder: Path, same: Callable, count: int):
    """Crashes at each point in turn, then at three points in a row, and resumes each time."""
    points, last = 0, False
    for point in range(1, count + 1):
        place = folder / f"crash-{point}"
        for number in (point,) if not last else (point % 7 + 1, point % 11 + 1, point % 5 + 1):

            def crashing(number: int = number, place: Path = place) -> None:
                crash_at(number)
                action(place)

            status = ended(forked(crashing))
            assert status in (0, CRASHED), f"point {point} ended with {status}"
            last = last or status == 0
            points += status == CRASHED
        assert ended(forked(lambda place=place: action(place))) == 0
        same(place)
    return points


def write_recipe(folder: Path, intervals: int) -> Path:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    lines = [" ".join(words[(i * k) % 9] for k in range(1, 3 + i % 6)) for i in range(1, 120)]
    for split, part in (("train", lines[:80]), ("valid", lines[80:100]), ("test", lines[100:])):
        (text / f"{split}.txt").write_text("\n".join(part) + "\n")
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(text=str(text), intervals=intervals))
    return path


def training(folder: Path) -> tuple[Action, Action, float]:
    """A training, the comparison of its run with one left alone, and the seconds of that."""
    config = recipes.load(write_recipe(folder, 6)).config

    def action(place: Path) -> None:
        assert train.run(config, place, device="cpu", progress=False).finished

    seconds = left_alone(action, folder)

    def same(place: Path) -> None:
        for which in ("best", "last"):
            file = f"checkpoint/{which}.safetensors"
            whole, other = load_file(folder / "whole" / file), load_file(place / file)
            assert whole.keys() == other.keys()
            assert all(torch.equal(whole[name], other[name]) for name in whole), f"{place} {which}"
            load_model(place, which)
        assert lines(folder / "whole") == lines(place)

    return action, same, seconds


def lines(run: Path) -> list[dict[str, object]]:
    """The lines of metrics without what depends on the clock."""
    timed = ("seconds", "targets_per_second", "digest")
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in found]


def evaluation(folder: Path) -> tuple[Action, Action, float]:
    """As `training`, for an evaluation that saves a part after every batch."""
    (folder / "chaotic.py").write_text(MODULE)
    os.chdir(folder)
    resume_store._SECONDS = 0.0
    names = ["chaotic:load_model", "chaotic:valid_batches"]
    options = ["--num-samples", "4", "--multipliers", "0", "1", "--quiet"]

    def action(place: Path) -> None:
        if (place / "scores/valid.safetensors").exists():
            return  # it was killed after it had saved everything
        assert main(["evaluate", *names, "--out", str(place), *options]) == 0

    seconds = left_alone(action, folder)

    def same(place: Path) -> None:
        file = "scores/valid.safetensors"
        assert (folder / "whole" / file).read_bytes() == (place / file).read_bytes(), place

    return action, same, seconds


def repeat_kills(
    make: Callable[..., tuple[Action, Action, float]], folder: Path, count: int
) -> int:
    """Kills at random times until there were `count` kills; every run must end as the whole one."""
    action, same, seconds = make(folder)
    rng, kills, run = random.Random(0), 0, 0
    while kills < count:
        place, run = folder / f"run-{run}", run + 1
        kills += kill_until_done(lambda place=place: action(place), 1.2 * seconds, rng)
        same(place)
    return kills


def on_last_attempt(place: Workplace, pid: int) -> bool:
    """Whether a worker has a point that lost its workers before: once more, and it is given up."""
    return any(
        trial.state == "running"
        and trial.notes.get("attempt", 1) >= ATTEMPTS
        and trial.notes.get("worker", "").rsplit("-", 2)[-2:-1] == [str(pid)]
        for trial in place.backend().trials()
    )


def tune_kills(folder: Path, count: int) -> int:
    """Kills workers of a study `count` times; every point must end once, with its own values."""
    settings = plan_study(str(write_recipe(folder, 8)), prune=False)
    place = Workplace(
        str(folder / "study"), None, "study", trials=2 * count + 2, reruns=0, quiet=True
    )
    join_study(place.backend(), settings)
    rng, kills = random.Random(1), 0
    crew = [forked(lambda: work(place)) for _ in range(2)]
    while kills < count:
        time.sleep(rng.uniform(0.05, 1.0))
        at = rng.randrange(2)
        if on_last_attempt(place, crew[at]):
            continue
        os.kill(crew[at], signal.SIGKILL)
        status = ended(crew[at])
        assert status in (0, -signal.SIGKILL), f"a worker ended with {status}"
        kills += 1
        crew[at] = forked(lambda: work(place))
    assert [ended(pid) for pid in crew] == [0, 0]
    rows = ends(place.backend().trials())
    assert [row.state for row in rows] == ["complete"] * (2 * count + 2)
    assert len({json.dumps(row.point, sort_keys=True) for row in rows}) == len(rows)
    return kills


def chaos(mode: str, folder: Path, count: int) -> int:
    """Runs one kind of chaos; returns the number of kills or crash points."""
    if mode == "tuning kills":
        return tune_kills(folder, count)
    make = training if mode.startswith("training") else evaluation
    if mode.endswith("kills"):
        return repeat_kills(make, folder, count)
    action, same, _ = make(folder)
    return crash_everywhere(action, folder, same, count)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(chaos(sys.argv[1], Path(sys.argv[2]).resolve(), int(sys.argv[3]))))
