"""A rank that is frozen rather than dead: the others say who is missing, and give up in time."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from launch import command, environment, pid_of_rank

from afterdrop.errors import RankError
from afterdrop.rank_watch import give_up_after


@pytest.mark.subprocess
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are found in /proc")
def test_a_frozen_rank_is_named_and_given_up(tmp_path):
    run = tmp_path / "run"
    train = ["-m", "afterdrop", "train", "digits-mlp", "--device", "cpu", "--quiet"]
    train += ["--set", "schedule.intervals=4000", "--set", "schedule.drop_latest=none"]
    launcher = subprocess.Popen(
        command(*train, "--out", str(run)),
        env=environment(AFTERDROP_RANK_TIMEOUT="8"),
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
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("text", ["", "soon", "-1", "0", "nan", "inf"])
def test_a_bad_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("AFTERDROP_RANK_TIMEOUT", text)
    with pytest.raises(RankError, match="AFTERDROP_RANK_TIMEOUT="):
        give_up_after()
