"""A rank that is frozen rather than dead: the others say who is missing, and give up in time."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import command, environment, pid_of_rank

from afterdrop.errors import RankError
from afterdrop.rank_watch import give_up_after

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="ranks are found in /proc, which is Linux's"
)


@contextlib.contextmanager
def training_with_frozen_rank(run, limit):
    """The launcher of a training whose rank 1 has been stopped, and the process of that rank."""
    train = ["-m", "afterdrop", "train", "digits-mlp", "--device", "cpu", "--quiet"]
    train += ["--set", "schedule.intervals=4000", "--set", "schedule.drop_latest=none"]
    launcher = subprocess.Popen(
        command(*train, "--out", str(run)),
        env=environment(AFTERDROP_RANK_TIMEOUT=limit),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert launcher.stderr is not None
    try:
        while not (run / "checkpoint" / "last.safetensors").exists():
            assert launcher.poll() is None, launcher.stderr.read()
            time.sleep(0.1)
        frozen = pid_of_rank(1, launcher.pid)
        os.kill(frozen, signal.SIGSTOP)
        yield launcher, frozen
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.subprocess
@linux
def test_a_frozen_rank_is_named_and_given_up(tmp_path):
    with training_with_frozen_rank(tmp_path / "run", limit="8") as (launcher, frozen):
        said = ""
        for line in launcher.stderr:
            said += line
            if "gives up (" in line:
                os.kill(frozen, signal.SIGCONT)
        assert re.search(
            r"afterdrop: rank 0 has waited \d s for rank 1, and gives up after 8", said
        )
        assert "rank 0 of 2 has waited" in said and "s for rank 1, which may be stopped" in said
        assert "The last good checkpoint is" in said
        assert launcher.wait(60) != 0


FREEZE = """
import os, signal
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.subprocess
@linux
def test_a_rank_that_is_frozen_before_it_joins_is_named(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FREEZE)  # which Python runs when it starts
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    train = ["-m", "afterdrop", "train", "digits-mlp", "--device", "cpu", "--quiet"]
    launcher = subprocess.Popen(
        command(*train, "--set", "schedule.intervals=1", "--out", str(tmp_path / "run")),
        env=environment(AFTERDROP_RANK_TIMEOUT="24", PYTHONPATH=paths),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        said = next(line for line in launcher.stderr if line.startswith("afterdrop"))
        assert "rank 0 has waited 12 s for rank 1, and gives up after 24 s" in said
        os.kill(pid_of_rank(1, launcher.pid), signal.SIGCONT)
        launcher.stderr.read()
        assert launcher.wait(60) == 0
    finally:
        launcher.kill()
        launcher.communicate()


def wait_for_end(pid):
    """Waits until a process has ended, and fails if it does not within ten seconds."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.subprocess
@linux
def test_training_that_waits_for_a_frozen_rank_can_be_told_to_stop(tmp_path):
    with training_with_frozen_rank(tmp_path / "run", limit="20") as (launcher, frozen):
        waiting = pid_of_rank(0, launcher.pid)
        os.kill(waiting, signal.SIGTERM)
        said = next(line for line in launcher.stderr if line.startswith("afterdrop rank 0"))
        assert re.search(
            r"0 of 2 received SIGTERM and has waited \d+ s for rank 1, which may", said
        )
        assert "The last good checkpoint is" in said and "run the same command again" in said
        wait_for_end(waiting)  # although its operation is not over
        os.kill(frozen, signal.SIGCONT)
        launcher.stderr.read()
        assert launcher.wait(60) != 0


MODULE = """
import os, signal
from pathlib import Path
import torch
from torch import nn

def load_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

def valid_batches():
    for number in range(6):
        if number == 4 and os.environ["RANK"] == "1":
            Path("frozen").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        yield torch.ones(3, 4) * number, torch.tensor([0, 1, 2])
"""


@pytest.mark.subprocess
@linux
def test_an_evaluation_that_waits_for_a_frozen_rank_ends_at_once_when_told_to(tmp_path):
    (tmp_path / "freezing.py").write_text(MODULE)
    evaluate = ["evaluate", "freezing:load_model", "freezing:valid_batches", "--out", "run"]
    launcher = subprocess.Popen(
        command("-m", "afterdrop", *evaluate, "--num-samples", "4", "--multipliers", "0", "1"),
        env=environment(),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        parts = tmp_path / "run/scores/valid.parts"
        while not (tmp_path / "frozen").exists() or not list(parts.glob("part-*")):
            assert launcher.poll() is None, launcher.stderr.read()
            time.sleep(0.05)
        waiting, frozen = pid_of_rank(0, launcher.pid), pid_of_rank(1, launcher.pid)
        os.kill(waiting, signal.SIGTERM)
        said = next(line for line in launcher.stderr if line.startswith("afterdrop rank 0"))
        assert "rank 0 of 2 received SIGTERM: another rank has ended, or the job was" in said
        assert "Finished parts are kept in run/scores/valid.parts" in said
        wait_for_end(waiting)
        os.kill(frozen, signal.SIGCONT)
        launcher.stderr.read()
        assert launcher.wait(60) != 0
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "nan", "inf"])
def test_a_bad_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("AFTERDROP_RANK_TIMEOUT", text)
    with pytest.raises(RankError, match="AFTERDROP_RANK_TIMEOUT="):
        give_up_after()
