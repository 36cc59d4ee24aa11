"""Errors in the user's own code, which the command line does not take for its own."""

import sys

import pytest

from afterdrop.cli import main
from afterdrop.cli.resolve import UserCodeError

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


@pytest.mark.parametrize(
    "content",
    [
        'open("weights.pt")\n',  # while it is imported, and while it is called
        'def load_model():\n    open("weights.pt")\n',
    ],
)
def test_a_file_that_the_users_code_does_not_find_has_a_traceback(write, content):
    write("mine", content)
    with pytest.raises(UserCodeError, match=r"mine:load_model raised FileNotFoundError") as caught:
        main(["sites", "mine:load_model", DATA])
    assert isinstance(caught.value.__cause__, FileNotFoundError)


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
