"""Every option of every verb with values that nobody should give: one line, never a traceback.

The options come from the signatures of the verbs, so that a new option is tested without a line
here; only a new verb needs a command that succeeds.
"""

import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import afterdrop as ad
from afterdrop import cli, interrupted_import, train
from afterdrop.cli import VERBS, main
from afterdrop.cli.options import checked
from afterdrop.errors import DataError
from afterdrop.evaluation.loop import Execution
from afterdrop.interrupted_import import is_command
from afterdrop.masks.uniforms import Plan
from afterdrop.plain_text import one_line, shell_word

MODULE = """
import torch
from torch import nn

def load_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))

def valid_batches():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(2)]
"""
RECIPE = """
[data]
name = "text"
[model]
hidden_sizes = [4]
input_dropout = 0.3
[objective]
batch_size = 4
window = 6
[optimiser]
learning_rate = 0.01
[schedule]
steps_per_interval = 2
intervals = 1
[validation]
stripes = 2
"""
OWN = ["mine:load_model", "mine:valid_batches"]
# A command of every verb that succeeds, in a folder with a module, a text, a recipe and a run.
COMMANDS: dict[str, list[str]] = {
    "train": ["recipe.toml", "--out", "new", "--quiet"],
    "tune": ["recipe.toml", "--study", "study", "--trials", "1", "--reruns", "0", "--quiet"],
    "evaluate": [*OWN, "--out", "own", "--num-samples", "2", "--quiet"],
    "select": ["run", "--resamples", "2"],
    "test": ["run", "--num-samples", "2", "--quiet", "--overwrite"],
    "predict": [*OWN, "--out", "p.npz", "--alpha", "1", "--multiplier", "1", "--num-samples", "2"],
    "report": ["run", "--out", "page.html", "--split", "nothing"],
    "compare": ["run", "run", "--out", "run"],
    "dynamic": ["run", "--etas", "1e-3", "--kappas", "0.02", "--limit", "20"],
    "score": ["run", "text/test.txt", "--num-samples", "2"],
    "sample": ["run", "--length", "3", "--num-samples", "2"],
    "reproduce": ["nowhere", "--quiet"],
    "sites": OWN,
    "check": [*OWN, "--num-samples", "10"],
    "data": ["list"],
    "doctor": [],
}
REFUSED = {"report", "compare", "reproduce"}  # their pages take seconds, so their commands fail
LONG = "x" * 5000
HUGE = str(2**70)
LARGE = str(2**32)  # fits 64 bits, but not memory
BATCHED = ("sites", "check", "evaluate", "predict")  # take --batch-dim
SIZES = "model.hidden_sizes"
TEXTS = ["", " ", LONG, "\x1b[31m", "a\nb", "../x", "\udcff", ".", "-"]
VALUES: dict[str, list[str]] = {
    "int": ["-1", "-3", "0", HUGE, f"-{HUGE}", "9" * 5000, "1e3", "nan", ""],
    "float": ["-1", "0", "nan", "inf", "-inf", "1e400", "9" * 5000, ""],
    "Path": [LONG, "mine.py/x", "", "\udcff", "a\nb"],
    "str": TEXTS,
    "Literal": ["", "other", LONG],
    "bool": [],
}


def kind_of(annotation: Any) -> str:
    """The kind of values of an option: the first plain type in its annotation."""
    words = set(re.findall(r"\w+", str(annotation)))
    return next(k for k in ("Literal", "Path", "float", "bool", "int", "str") if k in words)


def option_cases() -> list[Any]:
    """(verb, position or flag, value) for every argument and option of every verb."""
    cases = []
    for verb, function in VERBS.items():
        parameters = inspect.signature(function).parameters.items()
        for position, (name, parameter) in enumerate(parameters):
            given: int | str = position
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                named = [getattr(note, "name", None) for note in get_args(parameter.annotation)]
                given = f"--{next(filter(None, named), name).replace('_', '-')}"
            for at, value in enumerate(VALUES[kind_of(parameter.annotation)]):
                cases.append(pytest.param(verb, given, value, id=f"{verb} {name} {at}"))
    return cases


CASES = option_cases()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A folder with everything that the commands need."""
    folder = tmp_path_factory.mktemp("options")
    (folder / "mine.py").write_text(MODULE)
    (folder / "text").mkdir()
    for split in ("train", "valid", "test"):
        (folder / "text" / f"{split}.txt").write_text("a \x1b[31mb c\nb a d\n" * 30)
    recipe = RECIPE.replace('"text"', f'"{folder / "text"}"')
    (folder / "recipe.toml").write_text(recipe)
    config = ad.recipes.load(folder / "recipe.toml").config
    train.run(config, folder / "run", device="cpu", progress=False)
    run = ad.Run.open(folder / "run")
    request = ad.Request(ad.Grid((0, 1), (0, 1)), Plan(2), stream=run.stream(), limit=20)
    run.save_scores(run.evaluate(request, Execution()))
    run.save_choice(ad.select(run.scores(), resamples=2))
    return folder


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch) -> Path:
    shutil.copytree(prepared, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.delenv("AFTERDROP_DATA", raising=False)
    return tmp_path / "here"


def run_command(arguments: list[str]) -> int:
    """The exit status; tyro itself exits with 2 where a value is not of the declared type."""
    try:
        return main(arguments)
    except SystemExit as exit:
        assert isinstance(exit.code, int)
        return exit.code


@pytest.mark.parametrize("verb", VERBS)
def test_the_commands_that_the_options_are_added_to_succeed(folder, verb, capsys):
    assert run_command([verb, *COMMANDS[verb]]) == (2 if verb in REFUSED else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "given", "value"), CASES)
def test_no_value_of_an_option_ends_in_a_traceback(folder, capsys, verb, given, value):
    arguments = [verb, *COMMANDS[verb]]
    if isinstance(given, str):
        arguments.append(f"{given}={value}")
    elif given + 1 < len(arguments) and not arguments[given + 1].startswith("-"):
        arguments[given + 1] = value
    else:
        arguments.insert(given + 1, value)
    status = run_command(arguments)
    said = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert (status == 0) == (not said) or status == 1
    if said.startswith("afterdrop"):
        assert said.count("\n") == 1 and one_line(said[:-1]) == said[:-1]


def test_every_verb_and_hundreds_of_values_are_tried():
    assert COMMANDS.keys() == VERBS.keys() and len(CASES) > 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sites", ".mine:load_model", OWN[1]], "must be an import path"),
        (["sites", "mine..x:load_model", OWN[1]], "must be an import path"),
        (["sample", "run", "--seed", HUGE], "seed has 71 bits"),
        (["evaluate", *OWN, "--out", "own", "--split", "x" * 300], "at most 100 bytes"),
        (["evaluate", *OWN, "--out", "own", "--split", "a\nb"], r"split='a\nb'"),
        (["evaluate", *OWN, "--out", "own", "--alphas", "nan"], "alphas=nan is not finite"),
        (["report", LONG], "File name too long"),
        (["train", "recipe.toml", "--out", "new", "--set", "seed=" + "9" * 5000], "--set seed"),
        (["train", "recipe.toml", "--out", "new", "--set", "seed=" + "[" * 5000], "--set seed"),
        (["train", "recipe.toml", "--out", "new", "--set", f"seed={HUGE}"], "seed is 11805"),
        *(([verb, *COMMANDS[verb], "--batch-dim=-3"], "batch_dim=-3") for verb in BATCHED),
        (["select", "run", "--resamples", LARGE], "resamples=4294967296 must be between"),
        (["dynamic", *COMMANDS["dynamic"], "--window", LARGE], "window=4294967296 must be at most"),
        (
            ["evaluate", "run", "--overwrite", "--stripes", LARGE],
            "stripes=4294967296 must be at most",
        ),
        *(
            ([verb, *COMMANDS[verb], "--device", device], f"device='{device}' does not exist")
            for verb, device in (("train", "meta"), ("train", "xpu"), ("score", "meta"))
        ),
        (["sample", "run", "--device", "xpu:7"], "give cpu"),
        (["train", "recipe.toml", "--out", "new", "--set", f"{SIZES}=[{10**15}]"], "out of memory"),
        (["tune", *COMMANDS["tune"], "--workers", LARGE], "workers=4294967296 are too many"),
        (["tune", "recipe.toml", "--study", "s", "--storage", "x://u:secret@h"], "storage="),
        *(
            (["data", "fetch", "mnist", "--data", ".", "--mirror", mirror], "mirror")
            for mirror in (
                *("http://[::1", "http://h:999999", "http://" + "x" * 300 + ".example", "http://"),
                *("ftp://h", "file:///etc", "javascript:1", "http://a b/", "http://h/\r\nX: y"),
                *("http://user:secret@127.0.0.1:1/", "http://user:secret@[::1", "http://h:0"),
            )
        ),
    ],
)
def test_what_once_ended_in_a_traceback_is_one_line(folder, capsys, arguments, message):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("afterdrop: ") and said.count("\n") == 1
    assert message in said and "secret" not in said and len(said) < 6000


def test_tokens_and_samples_do_not_control_the_terminal(folder, capsys):
    assert main(["score", "run", "text/test.txt", "--tokens"]) == 0
    assert main(["sample", "run", "--length", "60"]) == 0
    shown = capsys.readouterr().out
    assert r"\x1b[31mb" in shown and "\x1b" not in shown


def test_names_in_a_choice_do_not_control_the_terminal(folder, capsys):
    name = "\x1b[31mred\n  forged\u202e"
    targets = torch.arange(12) % 3
    samples = [torch.randn(12, 3, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    names = [f"{name}{i}" for i in range(3)]
    run = ad.Run(folder / "ensemble")
    run.save_scores(ad.evaluate_samples(samples, targets, names=names))
    lines = set()
    for arguments in (["select", "ensemble"], ["report", "ensemble"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown and "\u202e" not in shown
        lines |= set(shown.splitlines())
    assert any(r"\x1b[31mred\n  forged" in line for line in lines)
    assert not any(line.startswith("  forged") for line in lines)


def test_commands_to_copy_are_quoted(folder, capsys):
    assert main(["train", "recipe.toml", "--out", "a b; c", "--quiet"]) == 0
    assert "Next: afterdrop evaluate 'a b; c'\n" in capsys.readouterr().out
    assert main(["sample", "a b; c"]) == 2
    assert "afterdrop select 'a b; c'\n" in capsys.readouterr().err
    assert shell_word("a'b\x1b") == r"$'a\'b\x1b'"
    assert shell_word(Path("./--out=x")) == "./--out=x"  # not an option


def test_a_null_character_is_refused():
    with pytest.raises(DataError, match="null character"):
        checked(VERBS["select"])(Path("a\0b"))


@pytest.mark.subprocess
@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT is sent differently there")
def test_an_interrupt_during_the_imports_is_one_line(tmp_path):
    """torch stands for what takes long to import; this one waits to be interrupted."""
    waiting = "import time\nopen('started', 'w').close()\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(waiting)
    process = subprocess.Popen(
        [sys.executable, "-m", "afterdrop", "data", "list"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(ad.__file__).parents[1]}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not (tmp_path / "started").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "\nafterdrop: interrupted before it started\n"


def test_a_second_interrupt_of_a_command_is_not_one_of_its_imports():
    """It would end the command at once, before finished batches are kept."""
    before = signal.signal(signal.SIGINT, interrupted_import._stop)
    try:
        assert main(["--version"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_while_an_error_is_shown_has_no_traceback(monkeypatch, capsys):
    def signalled(text):
        signal.raise_signal(signal.SIGTERM)
        return one_line(text)

    monkeypatch.setattr(cli, "one_line", signalled)
    assert main(["select", "nowhere"]) == 143
    assert capsys.readouterr().err == "\nafterdrop: terminated\n"


def test_only_the_command_line_handles_an_interrupt_of_its_imports():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not is_command(["-m"], ["python", "-m", "mypackage"])
    assert not is_command(["-c"], ["python", "-c", "import afterdrop"])
    assert not is_command([], []) and is_command(["afterdrop.exe"], ["afterdrop.exe"])
