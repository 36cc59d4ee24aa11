"""The example of the README writes a run folder that the command line reads on with."""

import runpy
import sys
from pathlib import Path

import pytest

import afterdrop as ad
from afterdrop.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.py"


@pytest.mark.slow
def test_the_verbs_go_on_with_what_the_example_wrote(tmp_path, monkeypatch, capsys):
    out = tmp_path / "digits"
    options = ["--out", str(out), "--epochs", "2", "--num-samples", "4"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    run = ad.Run.open(out)
    assert run.splits == ["test", "valid"] and not run.trained
    choice, final = run.choice, run.scores("test")
    assert choice.request == run.scores("valid").request
    assert choice.fingerprint == final.protocol.fingerprint
    assert choice.temperatures == (final.protocol.low, final.protocol.high)
    difference = final.difference(choice.member, ad.DET)
    printed = capsys.readouterr().out
    assert f"{difference.value:+.4f} ± {difference.error:.4f} nats" in printed

    assert main(["test", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"afterdrop: {out} holds scores of your own model")
    assert f"afterdrop evaluate MODEL DATA --out {out} --split test" in said
    assert said.count("\n") == 1
    assert main(["select", str(out)]) == 0
    assert ad.Run.open(out).choice.member == choice.member
    assert main(["report", str(out)]) == 0
    assert "Missing" not in capsys.readouterr().out
