"""Two-tailed averaging: against two naive means, and in runs that are interrupted."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from afterdrop import train
from afterdrop.errors import FileError
from afterdrop.models.fingerprint import fingerprint
from afterdrop.train import ConfigError
from afterdrop.train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from afterdrop.train.load_run import kept_fingerprint
from afterdrop.train.text_task import TextTask
from afterdrop.train.two_tailed import TwoTailedAverage
from afterdrop.train.validation import validate
from oracles.two_tailed import NaiveTails

STEPS = 2  # per interval
LOSSES = st.integers(0, 4)  # few values, so that ties occur


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(LOSSES, LOSSES, LOSSES), min_size=1, max_size=12),
    st.sampled_from([None, 1, 2]),
)
def test_every_decision_and_mean_is_that_of_two_naive_means(losses, patience):
    model = nn.Linear(2, 1).double()
    average, naive = TwoTailedAverage(model, patience), NaiveTails(patience)
    generator = torch.Generator().manual_seed(0)
    for raw, short, long in losses:
        for _ in range(STEPS):
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, generator=generator)
            average.update()
            naive.update(torch.cat([p.detach().flatten() for p in model.parameters()]))
        short = long if naive.one else short
        candidates = average.candidates()
        assert candidates == (("raw", "long") if naive.one else ("raw", "short", "long"))
        for which, wanted in naive.means().items():
            got = torch.cat([mean.flatten() for mean in average.mean(which).values()])
            np.testing.assert_allclose(got.numpy(), wanted, atol=1e-12)
        xe = {"raw": raw, "short": short, "long": long}
        chosen = average.settle({which: xe[which] for which in candidates}, STEPS)
        loss, is_raw = naive.evaluate(raw, short, long, STEPS)
        assert (xe[chosen], chosen == "raw") == (loss, is_raw)
        assert average.count == len(naive.long)
        if naive.long:
            got = torch.cat([mean.flatten() for mean in average.tensors().values()])
            np.testing.assert_allclose(got.numpy(), np.mean(naive.long, 0), atol=1e-12)


def test_one_mean_is_updated_per_step_and_the_model_is_given_back():
    model = nn.Linear(1, 1, bias=False)
    average = TwoTailedAverage(model)
    for value in (1.0, 2.0, 6.0):
        nn.init.constant_(model.weight, value)
        average.update()
        if value == 1.0:
            assert average.settle({"raw": 2.0, "long": 1.0}, 1) == "long"
            frozen = {name: tensor.clone() for name, tensor in average._frozen.items()}
    assert torch.equal(average._frozen["weight"], frozen["weight"])
    seen, weight = {}, model.weight
    for which in average.candidates():
        with average.in_place(which):
            seen[which] = model.weight.item()
    assert seen == {"raw": 6.0, "short": 4.0, "long": 3.0}
    assert model.weight is weight and weight.item() == 6.0


def run(config, out, **options):
    return train.run(config, out, device="cpu", progress=False, **options)


def metrics(out):
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    skipped = ("seconds", "targets_per_second", "digest")
    return [{k: v for k, v in line.items() if k not in skipped} for line in lines]


def checkpoint(out, which):
    return load_file(Path(out) / "checkpoint" / f"{which}.safetensors")


@pytest.fixture
def config(text_config):
    """Two-tailed averaging of a Mogrifier, at a learning rate where means pay off."""
    return text_config.override(
        {
            "averaging.kind": "two-tailed",
            "averaging.latest": None,
            "schedule.drop_latest": None,
            "optimiser.learning_rate": 0.3,
            "model.hidden_sizes": [8],
            "model.mogrifier_rounds": 3,
            "model.mogrifier_rank": 2,
        }
    )


def test_a_killed_and_interrupted_run_goes_on_to_the_bit(config, tmp_path, monkeypatch):
    assert run(config, tmp_path / "whole").finished
    real, calls = TextTask.loss, iter(range(1000))

    def loss(self, model, step):
        found, call = real(self, model, step), next(calls)
        if call == 12:
            raise KeyboardInterrupt  # as if killed: it goes on from interval 2, step 10
        if call == 12 + 1 + 13:
            signal.raise_signal(signal.SIGINT)  # saves inside interval 5
        return found

    monkeypatch.setattr(TextTask, "loss", loss)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "parts")
    assert run(config, tmp_path / "parts").step == 24
    kept = checkpoint(tmp_path / "parts", "last")
    assert {name.partition(".")[0] for name in kept} >= {"average", "short", "frozen"}
    assert run(config, tmp_path / "parts").finished
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "parts")
    for which in ("best", "last"):
        one, other = (checkpoint(tmp_path / name, which) for name in ("whole", "parts"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_weights_are_those_that_were_validated(config, tmp_path):
    run(config, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert lines[0]["averaged"] == 0 and "xe_long" not in lines[0]
    assert any("xe_short" in line for line in lines)
    for line in lines:
        compared = [line[name] for name in ("xe_raw", "xe_short", "xe_long") if name in line]
        assert line["xe_optimal"] == min(compared)  # without patience no worse mean is taken
    best = lines[lines[-1]["best_interval"]]
    assert best["averaged"] > 0  # a mean, not the weights themselves
    model, config, load_data = train.load_model(tmp_path / "run")
    with torch.no_grad():
        task = TextTask(config, load_data(), torch.device("cpu"))
        found = validate(task.validation_batches(model))
    assert (found.xe, found.xe_optimal) == (best["xe"], best["xe_optimal"])
    for which in ("best", "last"):
        model = train.load_model(tmp_path / "run", which).model
        assert kept_fingerprint(tmp_path / "run", which) == fingerprint(model)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"averaging.kind": "tails"}, "averaging.kind is 'tails'"),
        ({"averaging.latest": 4}, "averaging.latest is 4; two-tailed"),
        ({"averaging.patience": 0}, "averaging.patience is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, changes, words):
    with pytest.raises(ConfigError, match=words):
        config.override(changes)


def test_a_checkpoint_of_another_averaging_is_refused(config, tmp_path):
    run(config, tmp_path / "run", watch=lambda line: "stop" if line["interval"] == 3 else None)
    path = tmp_path / "run/checkpoint/last.safetensors"
    saved = read_checkpoint(path)
    for tails in (None, {**saved.facts["tails"], "frozen": 10**6}):
        write_checkpoint(path, Checkpoint(saved.tensors, {**saved.facts, "tails": tails}))
        with pytest.raises(FileError, match="tails"):
            run(config, tmp_path / "run")
