"""The report of a run shows the metrics of its likelihood, and leaves out what does not apply."""

import json

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.cli import main

GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
KINDS = ("binary", "multilabel", "gaussian", "squared_error")


class Pair(nn.Module):
    """A network that returns means and variances."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        mean, raw = self.net(x).unbind(-1)
        return mean, nn.functional.softplus(raw) + 0.05


def scores(kind, split):
    torch.manual_seed(0)
    outputs = {"multilabel": 3, "gaussian": 2}.get(kind, 1)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, outputs))
    model = Pair(net) if kind == "gaussian" else net
    torch.manual_seed({"valid": 1, "test": 2}[split])
    x = torch.randn(60, 4)
    y = x[:, :3] if kind == "multilabel" else x.sum(-1)
    if kind in ("binary", "multilabel"):
        y = y > 0
    return ad.evaluate(model, [(x, y)], grid=GRID, num_samples=8, likelihood=kind, split=split)


@pytest.mark.parametrize("kind", KINDS)
def test_the_verbs_go_on_with_scores_of_any_likelihood(kind, tmp_path, capsys):
    run = ad.Run(tmp_path / "run")
    for split in ("valid", "test"):
        run.save_scores(scores(kind, split))
    assert main(["select", str(run.path)]) == 0
    classes = tmp_path / "classes.json"
    names = ["wet", "cold", "dark"] if kind == "multilabel" else ["no", "yes"]
    classes.write_text(json.dumps(dict.fromkeys(names, 10) | {names[-1]: 400}))
    options = [] if kind in ("gaussian", "squared_error") else ["--classes", str(classes)]
    assert main(["report", str(run.path), *options]) == 0
    assert "Missing" not in capsys.readouterr().out
    html = (run.path / "report.html").read_text(encoding="utf-8")
    assert "could not be made" not in html
    numbers = kind in ("gaussian", "squared_error")
    assert ("CRPS" in html and "Calibration of quantiles" in html) == numbers
    assert ("Brier" in html and "Risk against coverage" in html) != numbers
    assert ("quantile averaging, ×" in html) == (kind == "gaussian")
    assert f"--likelihood {kind}" in html
    assert ("more probable" in html) != numbers
    assert ("NLL (nats)" in html) == numbers and ("XE (nats)" in html) != numbers
    assert ("the log-density of the targets by" in html) == numbers
