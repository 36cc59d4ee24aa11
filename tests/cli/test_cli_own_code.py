"""Errors in the user's own code, which the command line does not take for its own."""

import os
import sys

import pytest

from afterdrop.cli import main

DATA = "digits:valid_batches"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module that can be imported by name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, content):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(content)

    return write


MODEL = """
from torch import nn

def load_model():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
"""
MISSING = {
    "while it is imported": 'open("weights.pt")\n',
    "while it is called": 'def load_model():\n    open("weights.pt")\n',
    "in a forward pass": MODEL.replace("nn.Flatten()", "Reading()")
    + """
class Reading(nn.Flatten):
    def forward(self, x):
        open("weights.pt")
""",
}


@pytest.mark.parametrize("content", MISSING.values(), ids=MISSING)
def test_a_file_that_the_users_code_does_not_find_has_a_traceback(write, content):
    write("mine", content)
    with pytest.raises(FileNotFoundError, match=r"weights\.pt"):
        main(["sites", "mine:load_model", "builtin:digits"])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [FileNotFoundError, BrokenPipeError])
def test_what_the_users_data_raise_has_a_traceback(write, workers, error):
    loader = f"""
import torch

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        if number < 6:
            return torch.zeros(8, 8), 0
        raise {error.__name__}("image-6.png")

def valid_batches():
    return torch.utils.data.DataLoader(Images(), batch_size=2, num_workers={workers})
"""
    write("mine", MODEL + loader)
    with pytest.raises(error, match=r"image-6\.png") as caught:
        main(["evaluate", "mine:load_model", "mine:valid_batches", "--out", "run", "--quiet"])
    assert "the same command" in caught.value.__notes__[0]


@pytest.mark.parametrize("flush", [False, True])
def test_a_reader_of_what_the_users_code_prints_may_go_away(write, monkeypatch, flush):
    printing = f"""
class Printing(nn.Flatten):
    def forward(self, x):
        print("shapes", x.shape, flush={flush})
        return super().forward(x)
"""
    write("mine", MODEL.replace("nn.Flatten()", "Printing()") + printing)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["sites", "mine:load_model", "builtin:digits"]) == 141


def test_a_module_that_misses_a_package_has_a_traceback(write):
    write("mine", "import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        main(["sites", "mine:load_model", DATA])


def test_errors_of_afterdrop_in_the_users_code_stay_one_line(write, capsys):
    write("mine", 'from afterdrop.data import load\n\n\ndef load_model():\n    load("nothing")\n')
    assert main(["sites", "mine:load_model", DATA]) == 2
    assert capsys.readouterr().err.startswith("afterdrop: 'nothing' is neither a folder")


@pytest.mark.parametrize("path", ["no_such_module:load_model", "mine.part:load_model"])
def test_a_module_that_does_not_exist_is_one_line(write, capsys, path):
    write("mine", "")
    assert main(["sites", path, DATA]) == 2
    said = capsys.readouterr().err
    assert f"model='{path}'" in said and "run the command in its folder" in said
