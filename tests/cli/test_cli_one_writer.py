"""One process at a time evaluates a split of a run, whatever kind of evaluation it is."""

import sys

import numpy as np
import pytest

import afterdrop as ad
from afterdrop.cli import main

SOURCE = """
import torch
from torch import nn
from afterdrop.cli import main

inner, found = [], []

def load_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

def batches():
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=g), torch.randint(3, (8,), generator=g)) for _ in range(4)]

def meanwhile():
    for number, batch in enumerate(batches()):
        if number == 3 and inner:
            found.append(main(inner.pop()))
        yield batch
"""
FEW = ("--num-samples", "4", "--alphas", "0", "1")
KINDS = {
    "samples": ("evaluate", "mine:load_model", "mine:batches", "--num-samples", "2"),
    "auto": ("evaluate", "mine:load_model", "mine:batches", "--alphas", "0"),
    "files": ("evaluate", "--samples", "samples.npy", "--targets", "targets.npy"),
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    np.save("samples.npy", np.zeros((2, 5, 3), np.float32))
    np.save("targets.npy", np.zeros(5, np.int64))
    import mine  # from the folder of the test

    return mine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", [FEW, ("--alphas", "0", "1")], ids=["samples", "auto"])
def test_a_second_evaluation_of_a_split_is_refused(mine, capsys, outer, kind):
    mine.inner.append([*KINDS[kind], "--out", "run", "--quiet"])
    arguments = ["evaluate", "mine:load_model", "mine:meanwhile", "--out", "run", "--quiet"]
    assert main([*arguments, *outer]) == 0
    assert mine.found == [2]
    assert "another process is evaluating into" in capsys.readouterr().err
    assert ad.Run.open("run").scores().protocol.grid.alphas == (0.0, 1.0)
    assert [path.name for path in mine_files()] == ["valid.safetensors"]


def mine_files():
    return sorted(ad.Run.open("run").layout.scores("valid").parent.iterdir())


def test_a_refused_evaluation_leaves_no_folder(mine, capsys):
    assert main([*KINDS["files"], "--out", "new/run", "--single", "7"]) == 2
    assert not ad.Run("new/run").path.exists()


def test_one_folder_of_parts_has_one_evaluation(mine, tmp_path):
    """Stages of an adaptive evaluation reserve the folder that other evaluations use."""
    refused = []

    def meanwhile():
        for number, batch in enumerate(mine.batches()):
            if number == 3 and not refused:
                refused.append(None)
                with pytest.raises(ad.AfterdropError, match="another process is evaluating"):
                    ad.evaluate(mine.load_model(), mine.batches(), num_samples=2, resume=tmp_path)
            yield batch

    ad.evaluate(mine.load_model(), meanwhile(), num_samples="auto", resume=tmp_path)
    assert refused
