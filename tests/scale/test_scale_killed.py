"""Ranks killed with SIGKILL on the command line: a clear end, kept work, and going on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import command, environment, pid_of_rank, torchrun

import afterdrop as ad
from afterdrop.cli import main
from afterdrop.tensor_files import read_tensors

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="ranks are found in /proc, which is Linux's"
)

SMALL = (
    "model.hidden_sizes=[8]",
    "objective.batch_size=4",
    "objective.window=6",
    "schedule.intervals=25",
    "schedule.steps_per_interval=3",
    "validation.stripes=2",
)

# With DIE=yes, the iterator of rank 1 kills its process before batch 4, once rank 0 is there too.
MODULE = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn

def load_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

def valid_batches():
    generator = torch.Generator().manual_seed(1)
    for number in range(7):
        if number == 4 and os.environ.get("DIE") == "yes":
            Path("came-to-4-" + os.environ["RANK"]).touch()
            while os.environ["RANK"] == "1":
                if Path("came-to-4-0").exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
        draw = torch.randn(3, 4, generator=generator)
        yield draw, draw.argmax(-1) % 3
"""


def losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["xe"] for line in lines]


# As an optimiser does, it makes torch import what has the group as a default.
LEAVE = """
import os, sys
from pathlib import Path
import torch
from afterdrop.cli.torchrun import process_group

with process_group("cpu"):
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
left = sum("gloo" in name for name in names)
imported = "torch._dynamo" in sys.modules
os.write(1, f"imported: {imported}, threads left: {left}\\n".encode())  # ranks share the pipe
"""


@linux
def test_no_thread_of_the_group_is_left_that_could_outlive_the_interpreter(tmp_path):
    (tmp_path / "leave.py").write_text(LEAVE)
    done = torchrun(str(tmp_path / "leave.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("imported: True, threads left: 0") == 2, done.stdout


@linux
def test_a_rank_killed_in_training_ends_the_job_and_the_same_command_goes_on(text_folder, tmp_path):
    options = ["--data", str(text_folder), "--device", "cpu", "--quiet"]
    options += [word for change in SMALL for word in ("--set", change)]
    train = ["train", "lm", "--out", str(tmp_path / "two"), *options]
    job = subprocess.Popen(
        command("-m", "afterdrop", *train),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "two" / "metrics.jsonl"
    while job.poll() is None and not (metrics.exists() and len(losses(metrics.parent)) >= 2):
        time.sleep(0.01)
    os.kill(pid_of_rank(1, job.pid), signal.SIGKILL)
    _, said = job.communicate(timeout=120)
    assert job.returncode != 0
    assert "afterdrop rank 0: rank 0 of 2" in said, said[-3000:]
    assert "The last good checkpoint is" in said and "run the same command again" in said
    done = len(losses(tmp_path / "two"))
    assert 2 <= done < 26

    again = torchrun("-m", "afterdrop", *train)
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout.count("Finished: all 25 intervals are done") == 1  # only rank 0 prints
    assert main(["train", "lm", "--out", str(tmp_path / "one"), *options]) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """The arguments of an evaluation of a user's own model, to be started in its folder."""
    (tmp_path / "killable.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = ["killable:load_model", "killable:valid_batches"]
    return ["evaluate", *names, "--num-samples", "4", "--multipliers", "0", "1", "--out"]


def test_a_rank_killed_in_evaluation_leaves_parts_and_the_same_command_goes_on(evaluate):
    alone, two, parts = Path("alone"), Path("two"), Path("two/scores/valid.parts")
    assert main([*evaluate, str(alone), "--quiet"]) == 0
    killed = torchrun("-m", "afterdrop", *evaluate, str(two), DIE="yes")
    assert killed.returncode != 0
    assert "afterdrop rank 0: rank 0 of 2" in killed.stderr, killed.stderr[-3000:]
    assert f"Finished parts are kept in {parts}" in killed.stderr
    assert "run the same command to resume" in killed.stderr
    assert not (two / "scores/valid.safetensors").exists()
    kept = [read_tensors(path)[1]["numbers"] for path in sorted(parts.glob("part-*"))]
    assert kept[0][:2] == [0, 2]  # rank 0's; those of rank 1 died with it

    shutil.copytree(two, "lone")  # one process can resume from what a rank left
    assert main([*evaluate, "lone", "--quiet"]) == 0
    again = torchrun("-m", "afterdrop", *evaluate, str(two))
    assert again.returncode == 0, again.stderr[-3000:]
    assert again.stdout.count("Next: afterdrop select two") == 1
    assert not parts.exists()
    written = [run / "scores/valid.safetensors" for run in (alone, two, Path("lone"))]
    assert written[0].read_bytes() == written[1].read_bytes() == written[2].read_bytes()
    assert ad.Scores.load(written[1]).num_targets == 21


def test_a_batch_that_ranks_cannot_share_is_an_error_before_any_work(text_folder, tmp_path):
    options = ["train", "lm", "--data", str(text_folder), "--out", str(tmp_path / "run")]
    odd = torchrun("-m", "afterdrop", *options, "--set", "objective.batch_size=7")
    assert odd.returncode != 0
    assert "objective.batch_size is 7; 2 ranks cannot share it evenly" in odd.stderr
    assert not (tmp_path / "run").exists()
