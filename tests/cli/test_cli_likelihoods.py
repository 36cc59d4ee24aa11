"""`afterdrop evaluate --likelihood` on a user's own model, then select and report."""

import json

import pytest

import afterdrop as ad
from afterdrop.cli import main

MODULE = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(40, 4)
batches = {{"squared_error": [(x, x.sum(-1))], "multilabel": [(x, (x[:, :2] > 0).float())]}}
squared_error, multilabel = batches["squared_error"], batches["multilabel"]

def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, {outputs}))
"""


@pytest.mark.parametrize(("kind", "outputs"), [("squared_error", 1), ("multilabel", 2)])
def test_the_likelihood_is_an_option_of_evaluate(kind, outputs, tmp_path, monkeypatch, capsys):
    name = f"own_{kind}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(outputs=outputs))
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "run"
    options = ["--likelihood", kind, "--num-samples", "4", "--multipliers", "0", "1", "--quiet"]
    assert main(["evaluate", f"{name}:model", f"{name}:{kind}", "--out", str(out), *options]) == 0
    by = "crps" if kind == "squared_error" else "brier"
    assert main(["select", str(out), "--resamples", "0", "--by", by]) == 0
    assert main(["select", str(out), "--resamples", "0"]) == 0
    run = ad.Run.open(out)
    assert run.scores("valid").request.likelihood == kind
    stored = json.loads((out / "choice.json").read_text())
    assert kind in json.dumps(stored)
    assert "Gained" in capsys.readouterr().out or run.choice.member == ad.DET
