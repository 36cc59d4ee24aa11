"""The paper's whole experiment on the command line, on a user's own text, in small."""

import dataclasses
import random
import shutil
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import afterdrop as ad
from afterdrop.cli import main
from afterdrop.evaluation import StreamSettings
from afterdrop.models.fingerprint import fingerprint
from afterdrop.train import load_model
from afterdrop.train.checkpoint import read_checkpoint, write_checkpoint

SMALL = [
    "model.hidden_sizes=[12,12]",
    "schedule.intervals=2",
    "schedule.steps_per_interval=6",
    "schedule.drop_latest=1",
    "objective.batch_size=4",
    "objective.window=10",
    "validation.stripes=2",
]


EAGER_PARTS = """
import sys, time
from afterdrop.evaluation import resume_store
resume_store._SECONDS = 0
add = resume_store.ResumeStore.add
def slow_add(self, *args):
    add(self, *args)
    time.sleep(0.2)
resume_store.ResumeStore.add = slow_add
from afterdrop.cli import main
from afterdrop.evaluation import StreamSettings
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    text = folder / "text"
    text.mkdir()
    words = random.Random(0)
    for split, lines in (("train", 200), ("valid", 12), ("test", 12)):
        rows = [" ".join(words.choices("abcdefgh", k=6)) for _ in range(lines)]
        (text / f"{split}.txt").write_text("\n".join(rows) + "\n")
    out = folder / "run"
    changes = [argument for change in SMALL for argument in ("--set", change)]
    assert main(["train", "lm", "--data", str(text), "--out", str(out), "--quiet", *changes]) == 0
    return out


def test_train_evaluate_select_test_score_and_sample(run, capsys, tmp_path):
    assert (run / "checkpoint" / "best.safetensors").exists()
    options = ["--num-samples", "4", "--alphas", "0", "1", "--multipliers", "0", "1"]
    assert main(["evaluate", str(run), "--window", "0", *options]) == 2
    assert "window=0 must be at least 1" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--stripes", "2", *options]) == 0
    assert main(["select", str(run)]) == 0
    stream = StreamSettings(window=10, stripes=2, carry="deterministic", lifetime="window")
    assert ad.Run.open(run).choice.request.stream == stream
    assert _run_hint(capsys.readouterr().out)["predict"].request.stream == stream
    assert main(["test", str(run), "--quiet"]) == 0
    tested = capsys.readouterr().out
    assert "perplexity: " in tested
    scores = ad.Scores.load(run / "scores" / "test.safetensors")
    assert scores.split == "test" and scores.num_targets == 12 * 7
    assert main(["test", str(run), "--quiet"]) == 0
    assert capsys.readouterr().out == tested
    assert main(["test", str(run), "--quiet", "--num-samples", "8"]) == 2
    assert "test.safetensors" in capsys.readouterr().err

    (tmp_path / "new.txt").write_text("a b c\nd e\n")
    assert main(["score", str(run), str(tmp_path / "new.txt"), "--tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 + 1 and "7 tokens" in lines[-1] and "perplexity" in lines[-1]
    total = sum(float(line.split()[0]) for line in lines[:-1])
    assert f"{total:.1f}"[:4] in lines[-1]
    assert main(["sample", str(run), "--length", "5"]) == 0
    first = capsys.readouterr().out
    assert main(["sample", str(run), "--length", "5"]) == 0
    assert capsys.readouterr().out == first


def test_a_text_is_scored_as_it_was_evaluated(run, capsys, tmp_path):
    """With the last weights and independent masks, and so do the lines that select prints."""
    out = tmp_path / "run"
    shutil.copytree(run, out)
    best = out / "checkpoint" / "best.safetensors"
    saved = read_checkpoint(best)
    for tensor in saved.tensors.values():
        tensor.mul_(1.1)  # the last weights happen to be the best
    write_checkpoint(best, saved)
    options = ["--num-samples", "4", "--alphas", "1", "--multipliers", "0", "1", "--overwrite"]
    assert main(["evaluate", str(out), *options, "--which", "last", "--masks", "iid"]) == 0
    assert main(["select", str(out)]) == 0
    predict = _run_hint(capsys.readouterr().out)["predict"]
    opened = ad.Run.open(out)
    assert predict.request.plan.scheme == "iid"
    assert fingerprint(predict.model) == opened.choice.fingerprint
    assert fingerprint(load_model(out).model) != opened.choice.fingerprint
    opened.save_choice(dataclasses.replace(opened.choice, member=ad.AMC))  # whatever was chosen
    assert main(["score", str(out), str(run.parent / "text" / "valid.txt")]) == 0
    scores = ad.Scores.load(out / "scores" / "valid.safetensors")
    assert f"perplexity {scores.perplexity(ad.AMC).value:.2f}" in capsys.readouterr().out


@pytest.mark.subprocess
@pytest.mark.parametrize("carry", ["deterministic", "sampled"])
def test_an_evaluation_that_is_killed_goes_on_to_the_same_bytes(run, tmp_path, carry):
    options = [
        "--carry",
        carry,
        "--split",
        "train",
        "--num-samples",
        "4",
        "--multipliers",
        "0",
        "1",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for copy in (whole, killed):
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("scores", ".lock"))
    script = tmp_path / "eager_parts.py"  # a part after every batch, not only every few seconds
    script.write_text(EAGER_PARTS)
    command = [sys.executable, str(script), "evaluate", str(killed), "--quiet", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    parts = killed / "scores" / "train.parts"
    deadline = time.monotonic() + 60
    while not list(parts.glob("part-*")) and process.poll() is None:
        assert time.monotonic() < deadline, "no part was written within a minute"
        time.sleep(0.002)
    process.kill()  # SIGKILL
    assert process.wait(timeout=60) != 0, "the evaluation was over before it could be killed"
    assert list(parts.glob("part-*")) and not parts.with_suffix(".safetensors").exists()
    assert main(["evaluate", str(killed), "--quiet", *options]) == 0
    assert main(["evaluate", str(whole), "--quiet", *options]) == 0
    assert not parts.exists()
    resumed = (killed / "scores" / "train.safetensors").read_bytes()
    assert resumed == (whole / "scores" / "train.safetensors").read_bytes()


def _run_hint(printed):
    """Runs the Python lines that `select` printed last."""
    hint = printed.partition("in Python:\n")[2]
    names = {}
    exec(textwrap.dedent(hint), names)
    assert names["predict"](torch.tensor([[0, 1]])).shape[:2] == (1, 2)
    return names


def test_lamb_parity_evaluates_tempered_samples_with_their_own_states(run, capsys):
    options = ["--num-samples", "4", "--alphas", "1", "--multipliers", "0.8", "--split", "train"]
    assert main(["evaluate", str(run), "--lamb", "--stripes", "20", "--quiet", *options]) == 0
    scores = ad.Scores.load(run / "scores" / "train.safetensors")
    assert scores.request.stream.carry == "sampled"
    member = ad.Member(1.0, 0.8, temper="sample")
    fitted = scores.fit(member).member
    assert scores.xe(fitted).value <= scores.xe(member).value + 1e-6


@pytest.mark.parametrize(
    ("level", "hidden", "unit"),
    [
        ("word", [256, 256], "perplexity"),
        ("char", [512], "bits per char"),
        ("byte", [512], "bits per byte"),
    ],
)
def test_own_text_has_sizes_and_units_of_its_level_and_bears_new_words(
    tmp_path, capsys, level, hidden, unit
):
    for split, word in (("train", "seen"), ("valid", "new"), ("test", "newer")):
        (tmp_path / f"{split}.txt").write_text(
            f"a b c a b c {word}\n" * (40 if word == "seen" else 2)
        )
    arguments = ["--data", str(tmp_path), "--out", str(tmp_path / "run"), "--level", level]
    changes = ["schedule.intervals=1", "schedule.steps_per_interval=1", "objective.batch_size=2"]
    options = [argument for change in changes for argument in ("--set", change)]
    assert main(["train", "lm", *arguments, *options, "--quiet"]) == 0
    loaded = load_model(tmp_path / "run")
    assert loaded.config.to_dict()["model"]["hidden_sizes"] == hidden
    assert loaded.load_data().vocabulary.unknown == "<unk>"
    run = str(tmp_path / "run")
    options = ["--num-samples", "2", "--alphas", "1", "--multipliers", "0", "1", "--quiet"]
    assert main(["evaluate", run, *options]) == 0
    assert main(["select", run, "--folds", "0", "--resamples", "0"]) == 0
    assert main(["test", run, "--quiet"]) == 0
    assert f"{unit}: " in capsys.readouterr().out
    assert main(["score", run, str(tmp_path / "test.txt")]) == 0
    assert f"{unit} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "lm", "--out", "x"], "--data FOLDER"),
        (["train", "ptb-25m", "--out", "x"], "ptb-24m"),
        (["train", "digits-mlp", "--out", "x", "--set", "optimiser.rate=1"], "optimiser"),
        (["train", "digits-mlp", "--out", "x", "--set", "seed"], "name=value"),
        (["evaluate", "nowhere"], "not a folder of afterdrop train"),
        (["test", "nowhere"], "nowhere is not a folder"),
        (["data", "fetch"], "data fetch mnist"),
        (["data", "fetch", "ptb", "--data", "x"], "ptb cannot be fetched"),
    ],
)
def test_bad_input_of_the_verbs_is_named(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
