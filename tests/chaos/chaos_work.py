"""The work that is interrupted: a training and an evaluation, each with its whole result."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from chaos_log import WorkLog
from safetensors.torch import load_file

from afterdrop import recipes, train
from afterdrop.cli import main
from afterdrop.evaluation import resume_store
from afterdrop.evaluation.part_files import part_paths
from afterdrop.evaluation.resume_store import ResumeStore
from afterdrop.run_layout import RunLayout
from afterdrop.tensor_files import read_note
from afterdrop.train import training_loop
from afterdrop.train.load_run import load_model
from afterdrop.train.saved_state import read_training_facts
from afterdrop.train.trainer import Trainer

STEPS, BATCHES = 3, 12  # steps per validation interval, batches of the evaluation
DEVICE = os.environ.get("AFTERDROP_CHAOS_DEVICE", "cpu")
# Gradients of embeddings are added in no fixed order on a GPU, so that no two trainings are equal.
ROUNDING = 0.0 if DEVICE == "cpu" else 1e-3
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
steps_per_interval = {steps}
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
    for _ in range({batches}):
        time.sleep(0.004)
        yield torch.randn(3, 4, generator=generator), torch.randint(3, (3,), generator=generator)
"""


@dataclass(frozen=True)
class Work:
    """Work that can be resumed, and what is required of it.

    Attributes:
        action: Does the work in a folder, or what is left of it, and notes it in the log.
        same: Requires that the result in a folder is the one in FOLDER/whole.
        log: What the attempts began.
        total: The number of items of the work (steps or batches).
        lost: The most items that an interruption may cost.
    """

    action: Callable[[Path], None]
    same: Callable[[Path], None]
    log: WorkLog
    total: int
    lost: int

    def check(self) -> int:
        """Requires that nothing that was kept is done again; counts the resumed attempts."""
        self.log.check(self.total, self.lost)
        return self.log.resumed()


def keep_at_once() -> None:
    """Makes training keep every validation and evaluation every batch, however fast the disk is."""
    training_loop._WRITE_QUICK = math.inf
    resume_store._SECONDS = -1.0


def training(folder: Path, intervals: int = 6) -> Work:
    """A training. The items are its steps; those since the last validation may be lost."""
    config = recipes.load(write_recipe(folder, intervals)).config
    log = WorkLog(folder / "work.log")

    def action(place: Path) -> None:
        note_steps(log)
        log.start(place, steps_kept(place))
        assert train.run(config, place, device=DEVICE, progress=False).finished

    def same(place: Path) -> None:
        whole = folder / "whole"
        assert files(place) == files(whole), place
        for which in ("best", "last", "previous"):
            same_tensors(RunLayout(place), RunLayout(whole), which)
        for which in ("best", "last"):
            load_model(place, which)
        same_metrics(place, whole)

    return Work(action, same, log, intervals * STEPS, STEPS)


def evaluation(folder: Path) -> Work:
    """An evaluation by the command line. The items are its batches; one of them may be lost."""
    (folder / "chaotic.py").write_text(MODULE.format(batches=BATCHES))
    os.chdir(folder)
    names = ["chaotic:load_model", "chaotic:valid_batches"]
    options = ["--num-samples", "4", "--multipliers", "0", "1", "--device", DEVICE, "--quiet"]
    log = WorkLog(folder / "work.log")

    def action(place: Path) -> None:
        # Not every pass: that scores are those of this model and data is seen from plain ones.
        ResumeStore.add = log.noting(ResumeStore.add, lambda *arguments: arguments[1])
        log.start(place, batches_kept(place))
        if status := main(["evaluate", *names, "--out", str(place), *options]):
            raise SystemExit(status)

    def same(place: Path) -> None:
        whole = folder / "whole"
        assert files(place) == files(whole), place
        scores = [RunLayout(run).scores("valid").read_bytes() for run in (place, whole)]
        assert scores[0] == scores[1], place

    return Work(action, same, log, BATCHES, 1)


def write_recipe(folder: Path, intervals: int) -> Path:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    lines = [" ".join(words[(i * k) % 9] for k in range(1, 3 + i % 6)) for i in range(1, 120)]
    for split, part in (("train", lines[:80]), ("valid", lines[80:100]), ("test", lines[100:])):
        (text / f"{split}.txt").write_text("\n".join(part) + "\n")
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(text=str(text), steps=STEPS, intervals=intervals))
    return path


def note_steps(log: WorkLog) -> None:
    """Notes every training step of this process."""
    Trainer.train_step = log.noting(Trainer.train_step, lambda trainer: trainer.step)


def steps_kept(place: Path) -> int:
    """The step of the checkpoint that a training would resume from."""
    last = RunLayout(place).last
    return read_training_facts(last)["step"] if last.exists() else 0


def batches_kept(place: Path) -> int:
    """The batches in the parts of an evaluation; all of them if its scores are written."""
    run = RunLayout(place)
    if run.scores("valid").exists():
        return BATCHES
    return sum(len(read_note(path)["numbers"]) for path in part_paths(run.parts("valid")))


def files(place: Path) -> set[str]:
    """All files in a folder but those of locks, which a killed process may leave."""
    found = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
    return {name for name in found if not name.endswith(".lock")}


def same_tensors(run: RunLayout, other: RunLayout, which: str) -> None:
    """Requires that two runs have the same tensors in a checkpoint."""
    found, expected = load_file(getattr(run, which)), load_file(getattr(other, which))
    assert found.keys() == expected.keys(), f"{run.path} {which}"
    for name, tensor in found.items():
        other, place = expected[name], f"{run.path} {which} {name}"
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype), place
        if ROUNDING and tensor.is_floating_point():
            assert (tensor - other).norm() <= ROUNDING * (other.norm() + 1e-3), place
        else:
            assert torch.equal(tensor, other), place


def same_metrics(run: Path, other: Path) -> None:
    """Requires that two runs have the same lines of metrics."""
    found, expected = metrics(run), metrics(other)
    assert len(found) == len(expected), run
    for line, wanted in zip(found, expected):
        assert line.keys() == wanted.keys(), run
        for name, value in line.items():
            if ROUNDING and isinstance(value, float):
                assert math.isclose(value, wanted[name], rel_tol=ROUNDING, abs_tol=1e-6), (
                    run,
                    name,
                )
            else:
                assert value == wanted[name], (run, name)


def metrics(run: Path) -> list[dict[str, object]]:
    """The lines of metrics without what depends on the clock."""
    timed = ("seconds", "targets_per_second", "digest")
    found = [json.loads(line) for line in RunLayout(run).metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in timed} for line in found]
