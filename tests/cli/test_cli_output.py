"""Streams that are closed or full: what a command computes does not depend on what it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.subprocess,
    pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does"),
]
MODULE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

def batches():
    return [(torch.ones(4, 4), torch.arange(4) % 3)] * 2
"""
EVALUATE = "evaluate mine:model mine:batches --num-samples 2 --out run"
FULL = "/dev/full"


def shell(folder, command, **environment):
    (folder / "mine.py").write_text(MODULE)
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m afterdrop {command}"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (f"{EVALUATE} >&-", ""),
        (f"{EVALUATE} 2>&-", "Wrote run/scores"),
        (f"{EVALUATE} >&- 2>&-", ""),
        (f"{EVALUATE} 2>{FULL}", "Wrote run/scores"),
        ("data list >&-", ""),
        ("evaluate --help >&-", ""),
    ],
)
def test_what_cannot_be_shown_does_not_end_the_work(tmp_path, command, shown):
    done = shell(tmp_path, command)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout and "Traceback" not in done.stderr
    assert ("evaluate mine" not in command) or (tmp_path / "run/scores/valid.safetensors").exists()


@pytest.mark.skipif(not Path(FULL).exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [EVALUATE, "data list", "--version"])
def test_a_full_output_is_named(tmp_path, command):
    done = shell(tmp_path, f"{command} >{FULL}")
    assert done.returncode == 2
    assert "afterdrop: cannot write to the standard output: [Errno 28]" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert (command != EVALUATE) or (tmp_path / "run/scores/valid.safetensors").exists()


@pytest.mark.parametrize("size", ["", "two"])
def test_a_world_of_no_size_is_a_single_process(tmp_path, size):
    done = shell(tmp_path, "data list", RANK="0", WORLD_SIZE=size)
    assert done.returncode == 0 and "ptb" in done.stdout


def test_a_package_that_cannot_be_imported_is_not_called_missing(tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib/__init__.py").write_text("raise ImportError('built for numpy 1')")
    shell(tmp_path, EVALUATE)
    shell(tmp_path, "select run")
    done = shell(tmp_path, "report run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "matplotlib, which is there but cannot be imported (built for numpy 1)" in done.stderr


def test_predictions_are_not_made_for_a_place_that_cannot_hold_them(tmp_path):
    (tmp_path / "file").touch()
    loud = MODULE.replace("return [(", "print('read')\n    return [(")
    command = "predict mine:model mine:batches --num-samples 2 --out"
    (tmp_path / "loud.py").write_text(loud)
    done = shell(tmp_path, f"{command.replace('mine', 'loud')} file/p.csv")
    assert done.returncode == 2 and "cannot write to the folder" in done.stderr
    assert "read" not in done.stdout
    name = "long" * 60 + ".csv"
    assert shell(tmp_path, f"{command} {name}").returncode == 0 and (tmp_path / name).exists()
