"""What evaluate refuses, naming it and the remedy."""

import math

import pytest
import torch
from contract_cases import OPTIONS, N, Two, good
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, FileError, MemberError, SiteError
from oracles.zoo import mlp


def bad_logits(value):
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            out = self.inner(x).clone()
            out[1, 2] = value
            return out

    return Bad()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(value):
    with pytest.raises(DataError, match=r"NaN.*batch"):
        ad.evaluate(bad_logits(value), [good()], **OPTIONS)


def test_logits_that_overflow_in_one_sample_only_are_refused(tmp_path):
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(5, 3)

        def forward(self, x):
            dropped = self.drop(torch.ones_like(x))
            return self.out(x) / (dropped.sum(-1, keepdim=True) <= 5).float()

    with pytest.raises(DataError, match="NaN"):
        ad.evaluate(Sometimes(), [good()], resume=tmp_path / "parts", **OPTIONS)
    assert not (tmp_path / "parts").exists()  # there is nothing to keep


@pytest.mark.parametrize("targets", [torch.tensor([0, 3] * 6), torch.tensor([-1, 0] * 6)])
@pytest.mark.parametrize("later", [False, True])
def test_targets_out_of_range_are_refused(targets, later):
    batches = [good()] * later + [(good()[0], targets)]
    with pytest.raises(DataError, match=rf"batch {int(later)}.*3 classes"):
        ad.evaluate(mlp(), batches, **OPTIONS)


@pytest.mark.parametrize(
    "targets",
    [
        torch.rand(N),
        torch.zeros(N).bool(),
        torch.tensor(1),
        torch.nn.functional.one_hot(torch.zeros(N).long(), 3).float(),
    ],
)
def test_targets_that_are_no_classes_are_refused(targets):
    with pytest.raises(DataError, match="targets of batch 0"):
        ad.evaluate(mlp(), [(good()[0], targets)], **OPTIONS)


@pytest.mark.parametrize("count", [N - 1, N + 1, 2 * N])
def test_targets_of_another_number_are_refused(count):
    with pytest.raises(DataError, match="logits of shape"):
        ad.evaluate(mlp(), [(good()[0], torch.zeros(count).long())], **OPTIONS)


@pytest.mark.parametrize(
    "batches",
    [
        [torch.randn(N, 5)],
        [(torch.randn(N, 5),)],
        [(torch.randn(N, 5), torch.zeros(N).long(), 3)],
        [{"x": 1, "y": 2}],
        [None],
        (torch.randn(N, 5), torch.zeros(N).long()),
    ],
)
def test_batches_that_are_no_pairs_are_refused(batches):
    with pytest.raises(DataError, match=r"batch 0.*pair"):
        ad.evaluate(mlp(), batches, **OPTIONS)


@pytest.mark.parametrize("batches", [[], iter([])])
def test_no_data_is_refused(batches):
    with pytest.raises(DataError, match="empty"):
        ad.evaluate(mlp(), batches, **OPTIONS)


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_without_examples_is_refused(first):
    empty = torch.zeros(0, 5), torch.zeros(0).long()
    batches = [empty, good()] if first else [good(), empty]
    with pytest.raises(DataError, match=f"batch {0 if first else 1} has no examples"):
        ad.evaluate(mlp(), batches, **OPTIONS)


def test_data_that_all_is_ignored_is_refused():
    with pytest.raises(DataError, match="ignore_index"):
        ad.evaluate(mlp(), [(good()[0], torch.full((N,), -100))], **OPTIONS)


def test_one_logit_is_refused():
    with pytest.raises(DataError, match="2 classes"):
        ad.evaluate(mlp(classes=1), [(good()[0], torch.zeros(N).long())], **OPTIONS)


@pytest.mark.parametrize(
    "form", [lambda out: None, lambda out: {}, lambda out: out.argmax(-1), lambda out: "logits"]
)
def test_models_without_logits_are_refused(form):
    with pytest.raises(ad.AfterdropError, match="logits"):
        ad.evaluate(Two(form), [((good()[0], good()[0]), good()[1])], **OPTIONS)


def test_probabilities_are_refused_and_their_logarithms_are_not():
    data = [((good()[0], good()[0]), good()[1])]
    with pytest.raises(DataError, match="gives probabilities"):
        ad.evaluate(Two(lambda out: out.softmax(-1)), data, **OPTIONS)
    logs = ad.evaluate(Two(lambda out: out.softmax(-1).log()), data, **OPTIONS)
    wanted = ad.evaluate(Two(), data, **OPTIONS)
    assert logs.xe(ad.AMC).value == pytest.approx(wanted.xe(ad.AMC).value, rel=1e-6)


def test_a_dictionary_of_several_tensors_must_name_its_logits():
    with pytest.raises(DataError, match=r"'features': \(.*'out': \(.*logits='features' or"):
        ad.evaluate(
            Two(lambda out: {"features": out[:, :2], "out": out}),
            [((good()[0], good()[0]), good()[1])],
            **OPTIONS,
        )


def test_something_else_in_training_that_changes_the_shape_is_refused():
    class Shorter(nn.Module):
        def forward(self, x):
            return x if self.training else x[:, :3]

    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), Shorter())
    with pytest.raises(SiteError, match=r"shape \(3, 5\), in model.eval\(\) \(3, 3\)"):
        ad.evaluate(model, [(torch.randn(3, 4), torch.randint(3, (3,)))], num_samples=2)


def test_a_scalar_output_is_refused():
    with pytest.raises(DataError, match="logits"):
        ad.evaluate(Two(lambda out: out.mean()), [((good()[0], good()[0]), good()[1])], **OPTIONS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_samples": 1}, DataError, "num_samples=1"),
        ({"num_samples": 5}, DataError, "num_samples=5"),
        ({"num_samples": 0}, DataError, "num_samples=0"),
        ({"masks": "sobol"}, DataError, "sobol"),
        ({"blocks": 3}, DataError, "blocks=3"),
        ({"temperatures": (2.0, 1.0)}, MemberError, "temperatures"),
        ({"temperatures": (0.0, 1.0)}, MemberError, "temperatures"),
        ({"memory": 1000}, DataError, "memory=1000"),
        ({"rates": ("nothing",)}, SiteError, "nothing"),
        ({"grid": [ad.AMC]}, ad.AfterdropError, "grid"),
        ({"grid": ad.AMC}, ad.AfterdropError, "grid"),
        ({"batch_dim": 5}, ad.AfterdropError, "batch_dim"),
        ({"seed": 1.5}, DataError, "seed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        ad.evaluate(mlp(), [good()], **{**OPTIONS, **options})


def test_a_model_without_dropout_is_refused():
    with pytest.raises(SiteError, match="no dropout"):
        ad.evaluate(nn.Linear(5, 3), [good()], **OPTIONS)


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (None, [good()], "model is NoneType"),
        (nn.Linear, [good()], "model is the class Linear"),
        ([good()], mlp(), "model 0 is tuple; give modules"),
        (mlp(), 5, "batches is int"),
    ],
)
def test_what_is_no_model_or_no_data_is_named(model, batches, message):
    with pytest.raises(ad.AfterdropError, match=message):
        ad.evaluate(model, batches, **OPTIONS)


@pytest.mark.parametrize("temperatures", [2.0, (1.0,), "0.5 2"])
def test_temperatures_are_a_pair(temperatures):
    with pytest.raises(MemberError, match="must be a pair"):
        ad.evaluate(mlp(), [good()], **{**OPTIONS, "temperatures": temperatures})


def test_parts_that_cannot_be_kept_are_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("mine")

    def batches():
        yield good()
        pytest.fail("the second batch was asked for")

    with pytest.raises(FileError, match="cannot write to the folder"):
        ad.evaluate(mlp(), batches(), resume=tmp_path / "file" / "parts", **OPTIONS)
    assert (tmp_path / "file").read_text() == "mine"
