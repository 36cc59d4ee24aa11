"""afterdrop predict: files with a prediction and its uncertainty per example."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import afterdrop as ad
from afterdrop.cli import main
from afterdrop.cli.resolve import resolve_model
from afterdrop.errors import DataError
from afterdrop.selection.prediction_file import PredictionTable

SOURCE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def load_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))

def segmenter():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(6, 3, 1))

class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = load_model()

    def forward(self, x, y):
        return self.inner(x + y)

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))

    def forward(self, x):
        mean, raw = self.net(x).unbind(-1)
        return mean, raw.exp()

def one_output():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))

def numbered():
    return [(x, x.sum(-1)) for x in inputs().split(8)]

def inputs():
    return torch.randn(20, 6, generator=torch.Generator().manual_seed(1))

def labelled():
    return [(x, torch.zeros(len(x), dtype=torch.int64)) for x in inputs().split(8)]

def mappings():
    return [{"input": x, "labels": torch.zeros(len(x))} for x in inputs().split(8)]

def alone():
    return list(inputs().split(8))

def pairs():
    return [(x, 0 * x) for x in inputs().split(8)]

def dataset():
    return TensorDataset(inputs(), torch.zeros(20, dtype=torch.int64))

def images():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, 1, 4, 5, generator=g), torch.randn(1, 1, 4, 5, generator=g)]

def images_of_two_sizes():
    return [torch.randn(2, 1, 4, 5), torch.randn(1, 1, 6, 5)]
"""
OPTIONS = ["--num-samples", "16", "--blocks", "8"]
COLUMNS = ["confidence", "entropy", "mutual_information"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "source.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "source", raising=False)
    return tmp_path


def expected(member=ad.AMC):
    model = resolve_model("source:load_model")
    x = sys.modules["source"].inputs()
    return ad.Predictor(model, member, 16, blocks=8).uncertainty(x)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("load_model", ["labelled"]),
        ("load_model", ["mappings"]),
        ("load_model", ["alone"]),
        ("Sum", ["pairs", "--unlabelled"]),
        ("load_model", ["dataset", "--batch-size", "7"]),
    ],
)
def test_npz_files_hold_what_the_predictor_says(folder, model, data, capsys):
    arguments = [f"source:{model}", f"source:{data[0]}", *data[1:], *OPTIONS]
    assert main(["predict", *arguments, "--out", "new/out.npz"]) == 0
    assert "Mean over 20 examples: confidence" in capsys.readouterr().out
    found, arrays = expected(), np.load("new/out.npz")
    if model == "Sum":  # its dropout has another name, hence other masks
        assert arrays["prediction"].shape == (20,)
        return
    assert arrays["prediction"].tolist() == found.log_probs.argmax(-1).tolist()
    fields = found.confidence, found.predictive_entropy, found.mutual_information
    for name, values in zip(COLUMNS, fields):
        np.testing.assert_allclose(arrays[name], values.numpy(), atol=1e-5)
        assert arrays[f"{name}_error"].shape == (20,)
    assert list(folder.glob("new/*")) == [folder / "new/out.npz"]  # nothing temporary


def test_csv_and_jsonl_files_hold_the_same(folder):
    arguments = ["predict", "source:load_model", "source:alone", *OPTIONS]
    assert main([*arguments, "--out", "out.csv"]) == main([*arguments, "--out", "out.jsonl"]) == 0
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert list(rows[0]) == list(lines[0]) and rows[0].keys() >= {"example", "prediction"}
    assert [row["example"] for row in rows] == [str(i) for i in range(20)]
    for row, line in zip(rows, lines):
        assert {name: float(value) for name, value in row.items()} == line


def test_targets_of_an_example_are_rows_or_lists(folder):
    arguments = ["predict", "source:segmenter", "source:images", "--class-dim", "1", *OPTIONS]
    for suffix in ("csv", "jsonl", "npz"):
        assert main([*arguments, "--out", f"out.{suffix}"]) == 0
    with open("out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60 and (rows[25]["example"], rows[25]["target"]) == ("1", "5")
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    arrays = np.load("out.npz")
    assert arrays["confidence"].shape == (3, 4, 5)
    np.testing.assert_allclose([line["confidence"] for line in lines], arrays["confidence"])
    assert float(rows[25]["confidence"]) == pytest.approx(float(arrays["confidence"][1, 1, 0]))


def test_members_without_mutual_information_have_another_column(folder):
    arguments = ["predict", "source:load_model", "source:alone", *OPTIONS, "--alpha", "0"]
    assert main([*arguments, "--out", "out.npz"]) == 0
    arrays = np.load("out.npz")
    assert "disagreement" in arrays and "mutual_information" not in arrays
    found = expected(ad.GMC)
    np.testing.assert_allclose(arrays["disagreement"], found.disagreement.numpy(), atol=1e-5)


def test_the_choice_of_ones_own_model(folder, capsys):
    evaluate = ["evaluate", "source:load_model", "source:labelled", "--out", "run", "--quiet"]
    assert main([*evaluate, "--num-samples", "8", "--seed", "3"]) == 0
    assert main(["select", "run"]) == 0
    capsys.readouterr()
    arguments = ["predict", "source:load_model", "source:alone", "--choice", "run"]
    assert main([*arguments, "--out", "out.npz"]) == 0
    choice = ad.Run.open("run").choice
    assert str(choice.member) in capsys.readouterr().out
    x = sys.modules["source"].inputs()
    log_probs = choice.predictor(resolve_model("source:load_model"))(x)
    np.testing.assert_allclose(
        np.load("out.npz")["confidence"], log_probs.exp().amax(-1).numpy(), atol=1e-5
    )
    assert main([*arguments, "--out", "out2.npz", "--alpha", "1"]) == 2
    assert "--choice has a member of its own" in capsys.readouterr().err
    assert main(["predict", "run", "source:alone", "--out", "out2.npz"]) == 2
    assert "give the import path of your own model, and --choice run" in capsys.readouterr().err


def test_runs_of_afterdrop_train(folder, capsys):
    train = ["train", "digits-mlp", "--out", "run", "--quiet", "--set", "schedule.intervals=1"]
    assert main(train) == 0
    options = ["--num-samples", "4", "--device", "cpu"]
    assert main(["predict", "run", "test", "--out", "own.npz", *options]) == 0
    assert "arithmetic mean" in capsys.readouterr().out
    path = ["predict", "run", "builtin:digits", "--split", "test", "--out", "path.npz", *options]
    assert main(path) == 0
    own, path = np.load("own.npz"), np.load("path.npz")
    np.testing.assert_array_equal(own["prediction"], path["prediction"])
    assert main(["predict", "run", "dev", "--out", "other.npz"]) == 2
    assert "'dev' must be train, valid or test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("out.txt", "out.txt must end with .npz, .csv or .jsonl"),
        ("old.csv", "old.csv exists; --overwrite replaces it"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_any_work(folder, out, message, capsys):
    (folder / "old.csv").write_text("mine")
    assert main(["predict", "nowhere:model", "nowhere:data", "--out", out]) == 2
    assert message in capsys.readouterr().err
    assert (folder / "old.csv").read_text() == "mine"


def test_examples_of_several_sizes_do_not_fit_an_array(folder, capsys):
    arguments = ["predict", "source:segmenter", "source:images_of_two_sizes", "--class-dim", "1"]
    assert main([*arguments, *OPTIONS, "--out", "out.npz"]) == 2
    assert "write csv or jsonl" in capsys.readouterr().err
    assert main([*arguments, *OPTIONS, "--out", "out.csv"]) == 0
    assert len(Path("out.csv").read_text().splitlines()) == 1 + 2 * 20 + 30


def test_time_major_predictions_have_their_examples_first():
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    predict = ad.Predictor(net, ad.AMC, 4, batch_dim=1, class_dim=-1)
    table = PredictionTable(batch_dim=1)
    table.add(predict.uncertainty(torch.randn(5, 2, 4)))
    assert table.num_examples == 2
    with pytest.raises(DataError, match="must end with"):
        table.write(Path("a.txt"))


NUMBERS = ["prediction", "standard_deviation", "expected_variance", "variance_of_means"]


def test_numbers_have_a_mean_and_variances(folder, capsys):
    arguments = ["predict", "source:Pair", "source:alone", "--likelihood", "gaussian", *OPTIONS]
    for suffix in ("npz", "csv"):
        assert main([*arguments, "--out", f"out.{suffix}"]) == 0
    assert "Mean over 20 examples: standard deviation" in capsys.readouterr().out
    model, x = resolve_model("source:Pair"), sys.modules["source"].inputs()
    predict = ad.Predictor(model, ad.AMC, 16, blocks=8, likelihood="gaussian")
    found, arrays = predict.uncertainty(x), np.load("out.npz")
    values = found.mean, found.variance.sqrt(), found.expected_variance, found.variance_of_means
    for name, value in zip(NUMBERS, values):
        np.testing.assert_allclose(arrays[name], value.numpy(), rtol=1e-5, atol=1e-6)
    error = found.errors.variance / (2 * found.variance.sqrt())
    np.testing.assert_allclose(arrays["standard_deviation_error"], error.numpy(), rtol=1e-3)
    with open("out.csv", newline="") as file:
        row = next(csv.DictReader(file))
    errors = [f"{name}_error" for name in NUMBERS]
    assert sorted(row) == sorted(["example", *NUMBERS, *errors])


def test_the_choice_of_a_regression_predicts(folder, capsys):
    evaluate = ["evaluate", "source:one_output", "source:numbered", "--out", "run", "--quiet"]
    options = ["--likelihood", "squared_error", "--num-samples", "4", "--multipliers", "0", "1"]
    assert main([*evaluate, *options]) == 0
    assert main(["select", "run", "--resamples", "0"]) == 0
    arguments = ["predict", "source:one_output", "source:alone"]
    assert main([*arguments, "--choice", "run", "--out", "chosen.npz"]) == 0
    made = ad.Run.open("run").choice.predictor(resolve_model("source:one_output"))
    wanted = made(sys.modules["source"].inputs())
    np.testing.assert_allclose(np.load("chosen.npz")["prediction"], wanted.mean, atol=1e-5)
    assert main([*arguments, "--likelihood", "squared_error", "--out", "out.npz"]) == 2
    assert "noise_variance" in capsys.readouterr().err
    noise = ["--likelihood", "squared_error", "--noise-variance", "0.5"]
    assert main([*arguments, *noise, "--out", "out.npz"]) == 0
    np.testing.assert_allclose(np.load("out.npz")["expected_variance"], 0.5)


def test_one_logit_is_a_label_if_it_is_said_to_be(folder, capsys):
    arguments = ["predict", "source:one_output", "source:alone", *OPTIONS, "--out", "out.npz"]
    assert main(arguments) == 2
    assert "binary" in capsys.readouterr().err
    assert main([*arguments, "--likelihood", "binary"]) == 0
    arrays = np.load("out.npz")
    assert set(arrays["prediction"].ravel().tolist()) <= {0, 1} and len(arrays["prediction"]) == 20
