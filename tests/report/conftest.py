import random
import shutil

import pytest
from browser import Browser, find_chromium
from cases import EVIL, SMALL, own_scores

from afterdrop.cli import main


@pytest.fixture(scope="session")
def scores():
    return own_scores(blocks=8)


@pytest.fixture
def own_run(tmp_path, scores):
    """A folder that holds nothing but scores of a user's own model."""
    run = tmp_path / "mine"
    scores.save(run / "scores" / "valid.safetensors")
    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A trained, evaluated and tested language model whose words are HTML."""
    folder = tmp_path_factory.mktemp("trained")
    words = [name.replace(" ", "_") for name in EVIL[:3]] + list("abcdefgh")
    words += [f"word{i}" for i in range(25)]
    chance = random.Random(0)
    text = folder / "text"
    text.mkdir()
    for split, lines in (("train", 250), ("valid", 30), ("test", 30)):
        rows = [" ".join(chance.choices(words, k=6)) for _ in range(lines)]
        (text / f"{split}.txt").write_text("\n".join(rows) + "\n")
    run = folder / "run"
    changes = [argument for change in SMALL for argument in ("--set", change)]
    assert main(["train", "lm", "--data", str(text), "--out", str(run), "--quiet", *changes]) == 0
    options = ["--num-samples", "8", "--alphas", "0", "1", "--multipliers", "0", "0.5", "1"]
    assert main(["evaluate", str(run), "--quiet", "--blocks", "8", *options]) == 0
    assert main(["select", str(run)]) == 0
    assert main(["test", str(run), "--quiet"]) == 0
    return run


@pytest.fixture
def trained_copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine; apt-get install chromium")
    found = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield found
    found.close()
