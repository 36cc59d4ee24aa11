"""A training process killed with SIGKILL, again and again, ends in the very same run."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

# One fresh process imports torch once and forks the trainings, so that a killed one costs no
# new import. One thread: a fork of a process with OpenMP threads would hang.
DRIVER = """
import os, random, resource, signal, sys, time
import torch
torch.set_num_threads(1)
from afterdrop.train import TrainConfig, run

mode, folder, text = sys.argv[1:]
config = TrainConfig.from_dict({
    "data": {"name": text},
    "model": {"hidden_sizes": [16, 16], "input_dropout": 0.3, "state_dropout": 0.2},
    "objective": {"batch_size": 4, "window": 8, "l2_penalty": 1e-4, "state_reset": 0.1},
    "optimiser": {"learning_rate": 0.01, "max_norm": 1.0},
    "schedule": {"steps_per_interval": 10, "intervals": 20, "drop_latest": 8},
    "averaging": {"latest": 10},
    "validation": {"stripes": 4},
})

def train(out):
    run(config, out, device="cpu", progress=False)

def child(out):
    pid = os.fork()
    if pid == 0:
        train(out)
        os._exit(0)
    return pid

if mode == "killed":
    train(folder + "/warm")  # loads what torch loads late
    start = time.monotonic()
    train(folder + "/whole")
    took = time.monotonic() - start
    random.seed(3)
    kills = 0
    while True:
        pid = child(folder + "/killed")
        time.sleep(random.uniform(0.1, 0.5) * took)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        kills += os.WIFSIGNALED(status)
        assert kills < 100
    print(kills, status)
elif mode == "full":
    train(folder + "/whole")
    # Room for a checkpoint, but not for one with averaged weights, from interval 10 on.
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    try:
        train(folder + "/killed")
    except OSError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    train(folder + "/killed")
"""


def drive(mode: str, folder: Path, text: Path) -> str:
    command = [sys.executable, "-c", DRIVER, mode, str(folder), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_text(folder: Path) -> Path:
    folder.mkdir()
    words = ["a", "bb", "ccc", "dddd"]
    lines = [" ".join(words[(i * k) % 4] for k in range(1, 4 + i % 5)) for i in range(1, 160)]
    for split, part in (("train", lines[:110]), ("valid", lines[110:140]), ("test", lines[140:])):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n")
    return folder


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = ("seconds", "targets_per_second", "digest")
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics(one) == metrics(other)
    assert len(metrics(one)) == 21
    for which in ("last", "best"):
        a, b = (load_file(run / "checkpoint" / f"{which}.safetensors") for run in (one, other))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), which


def test_killed_at_random_times_and_resumed_is_bit_identical(tmp_path):
    kills, status = drive("killed", tmp_path, write_text(tmp_path / "text")).split()
    assert int(kills) >= 3 and int(status) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_disk_without_room_keeps_the_last_good_checkpoint(tmp_path):
    said = drive("full", tmp_path, write_text(tmp_path / "text"))
    assert "last.safetensors (step 90)" in said and "run the same command again" in said
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
