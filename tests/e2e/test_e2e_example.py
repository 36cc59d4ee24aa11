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
    assert f"{difference.value:+.4f} ± {difference.error:.4f} nats compared with mod" in printed
    assert (out / "family.png").read_bytes().startswith(b"\x89PNG")

    assert main(["test", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"afterdrop: {out} holds scores of your own model")
    assert f"afterdrop evaluate MODEL DATA --out {out} --split test" in said
    assert said.count("\n") == 1
    assert main(["select", str(out)]) == 0
    assert ad.Run.open(out).choice.member == choice.member
    assert main(["report", str(out)]) == 0
    assert "Missing" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("diabetes", ["gaussian: ", "squared_error: ", "Quantile averaging at x0.5", "CRPS"]),
        ("multilabel", ["XE per example", "Test cross entropy per label", "targets"]),
    ],
)
def test_the_examples_of_other_likelihoods_run(name, said, monkeypatch, capsys, tmp_path):
    path = EXAMPLE.with_name(f"{name}.py")
    options = ["--out", str(tmp_path), "--epochs", "3", "--num-samples", "4"]
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(words in printed for words in said)
    assert list(tmp_path.glob("*.png"))


@pytest.mark.slow
def test_the_lightning_example_saves_a_choice_beside_its_checkpoint(tmp_path, monkeypatch, capsys):
    path = EXAMPLE.with_name("lightning_callback.py")
    options = ["--out", str(tmp_path), "--epochs", "2", "--num-samples", "4"]
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    runpy.run_path(str(path), run_name="__main__")
    assert ad.Choice.load(tmp_path).headline() in capsys.readouterr().out
    assert list(tmp_path.glob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "picture", "shown"),
    [
        (
            "segmentation",
            ["--steps", "4", "--num-samples", "2"],
            "uncertainty.png",
            "nats per pixel",
        ),
        (
            "rejection",
            ["--epochs", "2", "--num-samples", "4"],
            "rejection.png",
            "mutual information",
        ),
        (
            "active_learning",
            ["--rounds", "2", "--steps", "2", "--seeds", "2"],
            "active_learning.png",
            "standard error over 2 seeds",
        ),
        (
            "conformal",
            ["--epochs", "2", "--num-samples", "4"],
            "conformal.png",
            "labels per set",
        ),
    ],
)
def test_examples_of_uncertainty_print_a_table_and_draw(
    name, options, picture, shown, tmp_path, monkeypatch, capsys
):
    path = EXAMPLE.with_name(f"{name}.py")
    monkeypatch.setattr(sys, "argv", [str(path), "--out", str(tmp_path), *options])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert shown in printed and "±" in printed
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "lora",
            ["--epochs", "1", "--adapter-epochs", "1", "--num-samples", "2"],
            ["lora_dropout.seed0", "Three adapters: ", "over the best member alone"],
        ),
        (
            "own_text",
            ["--intervals", "2", "--steps", "4", "--num-samples", "2"],
            ["words to train on", "minus temperature alone: ", "Drawn from the choice: "],
        ),
    ],
)
def test_examples_of_adapters_and_texts_run(name, options, said, tmp_path, monkeypatch, capsys):
    path = EXAMPLE.with_name(f"{name}.py")
    out = ["--out", str(tmp_path)] if name == "own_text" else []
    monkeypatch.setattr(sys, "argv", [str(path), *out, *options])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(words in printed for words in said)
