"""The example of an ensemble writes a run folder that the command line reads on with."""

import runpy
import sys
from pathlib import Path

import pytest

import afterdrop as ad
from afterdrop.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "ensemble.py"


@pytest.mark.slow
def test_the_example_chooses_and_the_verbs_go_on(tmp_path, monkeypatch, capsys):
    out = tmp_path / "ensemble"
    options = ["--out", str(out), "--members", "3", "--epochs", "3"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert (out / "ensemble.png").stat().st_size > 10_000 and "The members disagree by" in printed
    run = ad.Run.open(out)
    choice, scores = run.choice, run.scores()
    assert run.splits == ["noisy", "valid"] and choice.request == scores.request
    assert choice.ensemble.ensemble == scores.protocol.ensemble
    assert f"{choice.gain.value:.4f} ± {choice.gain.error:.4f} nats" in printed
    assert f"XE at T = 1 by the number of members: {choice.ensemble.curve[0][1]:.4f}" in printed
    assert main(["select", str(out), "--also", "noisy"]) == 0
    assert ad.Run.open(out).choice == choice
