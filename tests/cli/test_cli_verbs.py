import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import afterdrop as ad
from afterdrop import recipes
from afterdrop.cli import VERBS, main
from afterdrop.cli.resolve import resolve_model
from afterdrop.cli.train import parse_setting
from afterdrop.report.report_input import read_input
from afterdrop.report.shell_commands import repeat_commands

SOURCE = """
import time
from pathlib import Path
import numpy as np
import torch
from torch import nn

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.seen = load_model(), np.zeros(1)

    def forward(self, x):
        self.seen += len(x)
        return self.inner(x)

def load_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = load_model()

    def forward(self, x):
        return x, self.inner(x)

def no_dropout():
    return nn.Linear(6, 3)

def valid_batches():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(4)]

def other_batches():
    return [(x + 0.1, y) for x, y in valid_batches()]

def valid_batches_cut():
    return valid_batches()[:3]

class Louder(nn.Sequential):
    def __init__(self):
        super().__init__(*load_model())

    def forward(self, x):
        return super().forward(x) * 1.01

class Moved(Louder):
    def forward(self, x):
        linear, relu, drop, last = self
        return last(drop(relu(linear(x)).flip(-1)).flip(-1))

class Gentler(Louder):
    def __init__(self):
        super().__init__()
        self[2].p = 0.3

    def forward(self, x):
        return nn.Sequential.forward(self, x)

def held_batches():
    for number, batch in enumerate(valid_batches()):
        while Path(f"hold-{number}").exists():
            Path("held").touch()
            time.sleep(0.01)
        yield batch

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, number):
        time.sleep(0.02)
        return torch.ones(6), number % 3

def loaded_by_workers():
    return torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2)

not_a_model = 3
"""


RANGE = ("--temperatures", "3", "2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def test_evaluate_select_predict_from_the_command_line(folder, capsys):
    assert main(["sites", "mine:load_model", "mine:valid_batches"]) == 0
    assert "1 sites, 1 random operations" in capsys.readouterr().out
    arguments = ["evaluate", "mine:load_model", "mine:valid_batches", "--out", "run"]
    assert main([*arguments, "--num-samples", "8", "--alphas", "0", "1", "--quiet"]) == 0
    assert main(["select", "run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Gained ") and "nats over deterministic evaluation" in out
    assert "afterdrop.Run.open('run').choice.predictor(model)" in out
    run = ad.Run.open("run")
    scores = run.scores("valid")
    assert run.choice.member == ad.select(scores).member
    assert run.choice.fingerprint == scores.protocol.fingerprint
    assert scores.protocol.grid.alphas == (0.0, 1.0)


def test_the_number_of_samples_can_be_left_to_a_pilot(folder, capsys):
    arguments = ["evaluate", "mine:load_model", "mine:valid_batches", "--out", "run"]
    assert main([*arguments, "--mask-share", "0.5"]) == 0
    assert "pilot only, K = " in capsys.readouterr().out
    scores = ad.Run.open("run").scores()
    assert scores.request.adaptive.mask_share == 0.5 and scores.pilot is not None
    assert main([*arguments, "--num-samples", "auto", "--mask-share", "0.5"]) == 0
    assert "was already there" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "is of other settings" in capsys.readouterr().err
    command = repeat_commands(read_input(Path("run")))[0]
    assert command.endswith("--num-samples auto --mask-share 0.5") and "multipliers" not in command
    assert main(["select", "run", "--folds", "0", "--resamples", "0"]) == 0
    assert "for 100 samples" in capsys.readouterr().out


def test_where_the_logits_are_can_be_given_on_the_command_line(folder, capsys):
    for verb in (["sites"], ["evaluate", "--out", "run", "--quiet", "--num-samples", "2"]):
        arguments = [verb[0], "mine:Pair", "mine:valid_batches", *verb[1:]]
        assert main(arguments) == 2
        assert "say which: logits=0 or another" in capsys.readouterr().err
        assert main([*arguments, "--logits", "1"]) == 0
    assert ad.Run.open("run").scores("valid").protocol.request.logits == 1


def test_the_member_of_ones_own_model_opens_as_it_was_chosen(folder, capsys):
    arguments = ["evaluate", "mine:load_model", "mine:valid_batches", "--out", "run", "--quiet"]
    arguments += ["--num-samples", "8", "--masks", "iid", "--seed", "5"]
    assert main([*arguments, "--temperatures", "0.5", "4"]) == 0
    protocol = ad.Scores.load(folder / "run/scores/valid.safetensors").protocol
    assert (protocol.low, protocol.high) == (0.5, 4.0)
    assert main(["select", "run", "--num-samples", "4"]) == 0
    names = {"model": resolve_model("mine:load_model")}
    exec(textwrap.dedent(capsys.readouterr().out.partition("in Python:\n")[2]), names)
    predict, choice = names["predict"], ad.Run.open("run").choice
    plan = predict.request.plan
    assert (plan.num_samples, plan.seed, plan.scheme) == (4, 5, "iid")
    x = torch.randn(3, 6)
    expected = ad.Predictor(names["model"], choice.member, 4, 5, masks="iid")
    assert torch.equal(predict(x), expected(x))
    for verb in (["test"], ["score", "mine.py"], ["sample"]):
        assert main([verb[0], "run", *verb[1:]]) == 2
        said = capsys.readouterr().err
        assert said.startswith("afterdrop: run holds scores of your own model")
        assert "afterdrop evaluate MODEL DATA --out run --split" in said and said.count("\n") == 1


def test_only_the_weights_that_a_member_was_chosen_for_are_tested(folder, capsys):
    train = ["train", "digits-mlp", "--out", "run", "--quiet", "--set"]
    assert main([*train, "schedule.intervals=2"]) == 0
    evaluate = ["evaluate", "run", "--quiet", "--num-samples", "2", "--overwrite"]
    evaluate += ["--alphas", "1", "--multipliers", "0", "1"]
    for which in ("last", "best"):
        assert main([*evaluate, "--which", which]) == 0
        assert main(["select", "run"]) == 0
        assert main(["test", "run", "--quiet", "--overwrite"]) == 0
        scores = [ad.Scores.load(folder / f"run/scores/{s}.safetensors") for s in ("valid", "test")]
        assert scores[0].protocol.fingerprint == scores[1].protocol.fingerprint
        assert scores[0].protocol.low == scores[1].protocol.low
    assert main(["test", "run", "--split", "valid", "--overwrite"]) == 2
    assert "split='valid'" in capsys.readouterr().err
    assert len(ad.Scores.load(folder / "run/scores/valid.safetensors").members) == 2
    run = ad.Run.open("run")
    run.save_choice(dataclasses.replace(run.choice, fingerprint="of others"))
    assert main(["test", "run", "--overwrite"]) == 2
    assert "made for other weights" in capsys.readouterr().err


@pytest.mark.subprocess
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_training_stops_what_follows_it(folder, number, status):
    command = [sys.executable, "-m", "afterdrop", "train", "pydoc-small", "--out", "run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while process.poll() is None and not (folder / "run/checkpoint/last.safetensors").exists():
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == status
    assert b"run the same command to resume" in said


@pytest.mark.subprocess
@pytest.mark.usefixtures("default_signals")
@pytest.mark.skipif(sys.platform == "win32", reason="it has neither pty nor SIGHUP")
@pytest.mark.parametrize("options", [[], ["--quiet"]], ids=["bar", "quiet"])
def test_a_training_whose_terminal_is_closed_saves_and_ends_with_its_status(folder, options):
    import pty  # Unix only

    command = [sys.executable, "-m", "afterdrop", "train", "pydoc-small", "--out", "run", *options]
    terminal, inside = pty.openpty()
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    os.set_blocking(terminal, False)
    while process.poll() is None and not (folder / "run/checkpoint/last.safetensors").exists():
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 2**16)
        time.sleep(0.05)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 129


def wait_for(path, process):
    """Waits until a process that runs has written a file."""
    while process.poll() is None and not path.exists():
        time.sleep(0.01)


@pytest.mark.subprocess
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("numbers", "batch", "status"),
    [
        ([signal.SIGTERM], 0, 143),
        ([signal.SIGTERM], 2, 143),
        ([signal.SIGINT] * 9, 2, 130),  # an impatient user
        ([signal.SIGHUP], 2, 129),
    ],
)
def test_an_interrupted_evaluation_says_truly_what_is_kept(folder, numbers, batch, status):
    command = [sys.executable, "-m", "afterdrop", "evaluate", "mine:load_model"]
    command += ["mine:held_batches", "--out", "run", "--quiet", "--num-samples", "4"]
    Path(f"hold-{batch}").touch()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(Path("held"), process)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.01)
    _, said = process.communicate(timeout=120)
    assert process.returncode in (status, -numbers[0])  # which are the same to a shell
    assert b"Traceback" not in said
    parts = folder / "run/scores/valid.parts"
    assert bool(list(parts.glob("part-*"))) == (batch > 0)
    kept = b"2 finished batches are kept in run/scores/valid.parts: the same command resumes"
    assert (kept in said) == (batch > 0), said


@pytest.mark.subprocess
def test_finished_work_is_kept_although_the_signal_ends_workers_too(folder):
    """As `timeout` and schedulers send it, to all processes of a job."""
    command = [sys.executable, "-m", "afterdrop", "evaluate", "mine:load_model"]
    command += ["mine:loaded_by_workers", "--out", "run", "--num-samples", "4"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stderr is not None
    seen = b""
    while not re.search(rb" [1-9]\d*/100 ", seen) and process.poll() is None:
        seen += process.stderr.read(1)
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=120)[1].splitlines()[-1].decode()
    assert process.returncode == 143, said
    assert said.startswith("afterdrop: ") and said.endswith(": the same command resumes")
    assert len(list((folder / "run/scores/valid.parts").glob("part-*"))) == 1


def test_killed_after_saving_the_same_command_succeeds(folder, capsys):
    arguments = ["evaluate", "mine:load_model", "mine:valid_batches", "--out", "run"]
    arguments += ["--num-samples", "4"]
    assert main(arguments) == 0
    before, path = capsys.readouterr().out, folder / "run/scores/valid.safetensors"
    content = path.read_bytes()
    parts = folder / "run/scores/valid.parts"
    parts.mkdir()
    (parts / "part-00000.safetensors").write_text("left by the process that was killed")
    assert main(arguments) == 0
    again = capsys.readouterr().out
    assert again.split("valid.safetensors was already there")[0].split("run/")[0] in before
    assert not parts.exists() and path.read_bytes() == content
    path.write_bytes(content[:-1])
    assert main(arguments) == 2
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("load_model", "other_batches"),
        ("load_model", "valid_batches_cut"),
        ("Louder", None),
        ("Moved", None),
        ("Gentler", None),
    ],
)
def test_scores_of_other_data_or_code_are_not_taken_for_these(folder, capsys, model, data):
    arguments = ["--out", "run", "--num-samples", "4", "--quiet"]
    assert main(["evaluate", "mine:load_model", "mine:valid_batches", *arguments]) == 0
    assert main(["evaluate", f"mine:{model}", f"mine:{data or 'valid_batches'}", *arguments]) == 2
    said = capsys.readouterr().err
    assert "is of other data, or of a model with other code; --overwrite replaces it" in said


def test_existing_scores_are_not_replaced_unless_asked(folder, capsys):
    arguments = ["evaluate", "mine:load_model", "mine:valid_batches", "--out", "run"]
    arguments += ["--num-samples", "4", "--quiet"]
    assert main(arguments) == 0
    before = (folder / "run/scores/valid.safetensors").read_bytes()
    assert main([*arguments, "--seed", "1"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (folder / "run/scores/valid.safetensors").read_bytes() == before
    assert main([*arguments, "--seed", "1", "--overwrite"]) == 0
    assert (folder / "run/scores/valid.safetensors").read_bytes() != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sites", "mine", "mine:valid_batches"], "import path"),
        (["sites", "nowhere:model", "mine:valid_batches"], "nowhere"),
        (["sites", "mine:missing", "mine:valid_batches"], "missing"),
        (["sites", "mine:not_a_model", "mine:valid_batches"], "not a torch.nn.Module"),
        (["sites", "mine:no_dropout", "mine:valid_batches"], "no dropout"),
        (["select", "."], "afterdrop evaluate"),
        (["select", "empty"], "empty is not a folder"),
        (["test", "empty"], "empty is not a folder"),
        (["sample", "."], "holds neither a training run nor scores"),
        (["sample", ".", "--length", "0"], "length=0"),
        (["train", "digits-mlp", "--out", "r", "--device", "gpu"], "device='gpu'"),
        (["train", "digits-mlp", "--out", "r", "--device", "cuda:99"], "device='cuda:99'"),
        (["tune", "digits-mlp", "--study", "s", "--device", "gpu"], "device='gpu'"),
        (["train", "pydoc-small", "--out", "r", "--level", "char"], "--set data.level"),
        (["data", "fetch", "mnist"], "--data DIR"),
        (["evaluate", "mine:load_model", "builtin:digits", "--out", "r", "--split", "x"], "splits"),
        (
            ["evaluate", "mine:load_model", "mine:valid_batches", "--out", "r", "--alphas", "2"],
            "alpha=2",
        ),
        (
            ["evaluate", "mine:load_model", "mine:valid_batches", "--out=r", "--num-samples=7"],
            "num_samples=7",
        ),
        (["evaluate", "mine:load_model", "mine:valid_batches"], "--out is missing"),
        (["report", ".", "--split", "nothing"], "no scores of the split 'nothing'"),
        *(
            (["evaluate", "mine:load_model", "mine:valid_batches", "--out=r", *more], more[0])
            for more in (["--limit", "3"], ["--window", "5"], ["--stripes", "2"], ["--lamb"])
        ),
        (["evaluate", "mine:load_model"], "not a folder of afterdrop train"),
        (
            ["evaluate", "mine:load_model", "mine:valid_batches", "--out=r", "--split=../x"],
            "split='../x'",
        ),
        (
            ["evaluate", "mine:load_model", "mine:valid_batches", "--out=r", *RANGE],
            "temperatures=(3, 2)",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_it(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("AFTERDROP_DATA", raising=False)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("afterdrop: ")
    assert message in captured.err


def test_a_failed_check_gives_exit_status_1(folder, capsys):
    assert main(["check", "mine:load_model", "mine:valid_batches"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 6
    assert main(["check", "mine:Counting", "mine:valid_batches", "--num-samples", "10"]) == 1
    assert "FAILED   model unchanged" in capsys.readouterr().out


def test_every_verb_is_in_the_overview_and_teaches_by_example(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb} " in overview
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        shown = capsys.readouterr().out
        examples = [line for line in shown.splitlines() if line.startswith("  afterdrop ")]
        assert examples, verb
        assert all(line.split()[1] == verb for line in examples)


def test_a_misspelt_verb_is_answered_with_the_right_one(capsys):
    assert main(["evalute", "run"]) == 2
    assert "no verb 'evalute'; try evaluate" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert ad.__version__ in capsys.readouterr().out


def test_settings_are_toml_values_bare_words_or_none():
    assert parse_setting("schedule.stop_targets=[4.4, 4.2]")[1] == [4.4, 4.2]
    assert parse_setting("model.state_sharing=step")[1] == "step"
    name, value = parse_setting("schedule.drop_patience=none")
    config = recipes.load("ptb-10m").config.override({name: value})
    assert config.schedule.drop_patience is None


def test_selecting_on_test_scores_is_refused(folder, capsys):
    arguments = ["evaluate", "mine:load_model", "mine:valid_batches", "--out", "run"]
    assert main([*arguments, "--num-samples", "4", "--split", "test", "--quiet"]) == 0
    assert main(["select", "run", "--split", "test"]) == 2
    assert "test split" in capsys.readouterr().err
    assert not ad.Run.open("run").has_choice
    for verb in ("test", "sample"):
        assert main([verb, "run"]) == 2
        assert "afterdrop select run" in capsys.readouterr().err


@pytest.mark.subprocess
def test_a_reader_that_goes_away_costs_nothing(folder):
    """As `afterdrop select RUN | head -0` does: the choice is written, and nothing is said."""
    arguments = ["evaluate", "mine:load_model", "mine:valid_batches", "--out", "run"]
    assert main([*arguments, "--num-samples", "4", "--quiet"]) == 0
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "afterdrop", "select", "run"]
    done = subprocess.run(command, cwd=folder, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    assert ad.Run.open("run").choice.num_samples == 4


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_a_reader_of_the_help_may_go_away(monkeypatch, argument):
    """As `afterdrop --help | head -1` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main([argument]) == 141


def test_a_foreign_choice_file_is_refused(folder, capsys):
    (folder / "choice.json").write_text(json.dumps({"kind": "something"}))
    assert main(["test", "."]) == 2
    assert "not an afterdrop-choice file" in capsys.readouterr().err


@pytest.mark.subprocess
@pytest.mark.usefixtures("default_signals")
def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_bytes(folder, capsys):
    arguments = ["evaluate", "mine:load_model", "mine:held_batches", "--num-samples", "4"]
    Path("hold-2").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "afterdrop", *arguments, "--out", "run"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    wait_for(Path("held"), process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command resumes" in said
    assert list((folder / "run/scores/valid.parts").glob("part-*"))
    Path("hold-2").unlink()
    assert main([*arguments, "--out", "run", "--quiet"]) == 0
    assert main([*arguments, "--out", "whole", "--quiet"]) == 0
    resumed = Path("run/scores/valid.safetensors").read_bytes()
    assert resumed == Path("whole/scores/valid.safetensors").read_bytes()
    assert not Path("run/scores/valid.parts").exists()
