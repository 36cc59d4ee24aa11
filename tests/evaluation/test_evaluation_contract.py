"""What evaluate takes: forms of inputs, outputs, targets and models."""

import collections
import math
import types

import pytest
import torch
from contract_cases import GRID, OPTIONS, N, Two, assert_same, good
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError
from oracles.zoo import mlp


@pytest.fixture
def two():
    a, b, y = torch.randn(N, 5), torch.randn(N, 5), torch.randint(3, (N,))
    return a, b, y, ad.evaluate(Two(), [((a, b), y)], **OPTIONS)


class Encoding(collections.UserDict):
    """A mapping that is not a dict, like transformers' BatchEncoding."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, b],
        lambda a, b: {"a": a, "b": b},
        lambda a, b: collections.OrderedDict(b=b, a=a),
        lambda a, b: Encoding(a=a, b=b),
        lambda a, b: {"a": a, "b": b, "scale": 1.0},
        lambda a, b: {"a": a, "b": b, "scale": torch.tensor(1.0)},
    ],
)
def test_inputs_as_tuple_list_and_mappings(two, wrap):
    a, b, y, expected = two
    assert_same(ad.evaluate(Two(), [(wrap(a, b), y)], **OPTIONS), expected)


@pytest.mark.parametrize(
    "form",
    [
        lambda out: (out,),
        lambda out: (out, torch.zeros(3)),
        lambda out: [out],
        lambda out: types.SimpleNamespace(loss=torch.tensor(1.0), logits=out),
        lambda out: {"logits": out},
        lambda out: {"loss": torch.tensor(1.0), "logits": out},
        lambda out: {"features": out.new_zeros(len(out), 7), "logits": out},
    ],
)
def test_outputs_as_tensor_tuple_and_objects_with_logits(two, form):
    a, b, y, expected = two
    assert_same(ad.evaluate(Two(form), [((a, b), y)], **OPTIONS), expected)


def test_a_tensor_and_a_loader(two):
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    model = mlp()
    expected = ad.evaluate(model, [(x[:8], y[:8]), (x[8:], y[8:])], **OPTIONS)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    assert_same(ad.evaluate(model, loader, **OPTIONS), expected)
    assert_same(ad.evaluate(model, iter(loader), **OPTIONS), expected)
    assert_same(
        ad.evaluate(model, ((x[i : i + 8], y[i : i + 8].tolist()) for i in (0, 8)), **OPTIONS),
        expected,
    )


class Tagger(nn.Module):
    def __init__(self, time_major=False, flat=False):
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.time_major, self.flat = mlp(), time_major, flat

    def forward(self, x):
        out = self.inner(x)
        return out.flatten(0, -2) if self.flat else out


def sequences():
    x, y = torch.randn(N, 4, 5), torch.randint(3, (N, 4))
    y[torch.rand(N, 4) < 0.3] = -100
    y[3] = -100  # a whole example that does not count
    return x, y


def test_sequences_with_ignored_targets():
    x, y = sequences()
    model = Tagger()
    scores = ad.evaluate(model, [(x, y)], **OPTIONS)
    counts = y != -100
    assert scores.num_targets == counts.sum()
    examples = torch.arange(N).unsqueeze(1).expand(N, 4)[counts]
    assert torch.equal(scores.examples, examples)
    with torch.no_grad():
        lp = model.eval()(x).log_softmax(-1)
    expected = -lp[counts].gather(-1, y[counts].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(scores.values(ad.DET).whole.float(), expected)
    assert torch.equal(scores.clusters.unique(), torch.arange(N - 1))
    by_one = ad.evaluate(model, [(a[None], b[None]) for a, b in zip(x, y)], **OPTIONS)
    torch.testing.assert_close(by_one.values(ad.AMC).whole, scores.values(ad.AMC).whole)
    small = ad.evaluate(model, [(x, y)], memory=2**20, **OPTIONS)
    torch.testing.assert_close(small.values(ad.AMC).whole, scores.values(ad.AMC).whole)


def test_a_first_batch_without_any_target():
    x, y = sequences()
    none = torch.full_like(y, -100)
    scores = ad.evaluate(Tagger(), [(x, none), (x, y)], grid=GRID, num_samples=4)
    assert scores.num_targets == (y != -100).sum()


def test_another_ignore_index():
    x, y = sequences()
    a = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    b = ad.evaluate(Tagger(), [(x, y.where(y >= 0, torch.tensor(1)))], ignore_index=1, **OPTIONS)
    assert b.num_targets == ((y == 0) | (y == 2)).sum() < a.num_targets


def test_time_major_data_is_the_transposed_data():
    x, y = sequences()
    expected = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    got = ad.evaluate(Tagger(), [(x.transpose(0, 1), y.t())], batch_dim=1, **OPTIONS)
    assert torch.equal(got.targets, expected.targets)
    torch.testing.assert_close(got.values(ad.DET).whole, expected.values(ad.DET).whole)
    assert got.bounds(ad.AMC).variance > 0


def test_flattened_logits_of_batch_major_data_give_the_same_scores():
    x, y = sequences()
    expected = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    got = ad.evaluate(Tagger(flat=True), [(x, y)], **OPTIONS)
    assert torch.equal(got.examples, expected.examples)
    for member in expected.members:
        torch.testing.assert_close(got.values(member).whole, expected.values(member).whole)


def test_flattened_logits_of_time_major_data_are_refused():
    """Their rows are ordered by time first, so they cannot be assigned to examples."""
    x, y = sequences()
    with pytest.raises(DataError, match=r"logits of shape \(48, 3\).*batch_dim=1"):
        ad.evaluate(Tagger(flat=True), [(x.transpose(0, 1), y.t())], batch_dim=1, **OPTIONS)


def test_logits_and_targets_that_are_each_others_transpose_are_refused():
    class TimeMajor(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return self.inner(x).transpose(0, 1)

    x, y = sequences()
    with pytest.raises(DataError, match="logits of shape"):
        ad.evaluate(TimeMajor(), [(x, y)], **OPTIONS)


def test_classes_in_the_second_dimension_need_class_dim():
    class Segmenter(nn.Module):
        def __init__(self, second):
            super().__init__()
            torch.manual_seed(2)
            self.inner, self.second = mlp(), second

        def forward(self, x):
            logits = self.inner(x)
            return logits.transpose(1, 2) if self.second else logits

    x, y = sequences()
    model, other = Segmenter(second=True), Segmenter(second=False)
    with pytest.raises(DataError, match="would match with class_dim=1"):
        ad.evaluate(model, [(x, y)], **OPTIONS)
    with pytest.raises(DataError, match="no dimension class_dim=3"):
        ad.evaluate(model, [(x, y)], class_dim=3, **OPTIONS)
    found = ad.evaluate(model, [(x, y)], class_dim=1, **OPTIONS)
    assert_same(found, ad.evaluate(other, [(x, y)], **OPTIONS))
    for member in (ad.DET, ad.AMC):
        log_probs = ad.Predictor(model, member, 4, class_dim=1)(x)
        expected = ad.Predictor(other, member, 4, class_dim=-1)(x)
        torch.testing.assert_close(log_probs.transpose(1, 2), expected)


def test_images_of_targets():
    x, y = torch.randn(3, 2, 4, 5), torch.randint(3, (3, 2, 4))
    scores = ad.evaluate(Tagger(), [(x, y)], **OPTIONS)
    assert scores.num_targets == 24 and int(scores.clusters.max()) == 2


def test_grids_with_the_deterministic_member_alone_need_no_dropout():
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    scores = ad.evaluate(nn.Linear(5, 3), [(x, y)], grid=ad.Grid((0, 1), (0,)), num_samples=1)
    assert scores.members == [ad.DET] and scores.xe(ad.DET).mc_error == 0
    assert ad.select(scores).member.deterministic


def test_one_sample_with_one_alpha():
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    scores = ad.evaluate(mlp(), [(x, y)], grid=ad.Grid((1,), (0, 1)), num_samples=1)
    estimate = scores.xe(ad.AMC)
    assert math.isnan(estimate.mc_error) and estimate.error > 0
    bounds = scores.bounds(ad.AMC)
    assert bounds.jensen_gap == pytest.approx(0, abs=1e-6) == bounds.variance
    assert math.isnan(scores.difference(ad.AMC, ad.DET).mc_error)
    assert ad.select(scores).ranking


def test_float64_models_and_half_precision_logits():
    x, y = torch.randn(N, 5), torch.randint(3, (N,))
    model = mlp()
    expected = ad.evaluate(model, [(x, y)], **OPTIONS)
    double = ad.evaluate(model.double(), [(x.double(), y)], **OPTIONS)
    torch.testing.assert_close(
        double.values(ad.AMC).whole, expected.values(ad.AMC).whole, rtol=0, atol=1e-5
    )
    half = ad.evaluate(model.bfloat16(), [(x.bfloat16(), y)], **OPTIONS)
    torch.testing.assert_close(
        half.values(ad.AMC).whole, expected.values(ad.AMC).whole, rtol=0, atol=0.05
    )


def test_the_protocol_says_how_the_scores_were_made():
    scores = ad.evaluate(mlp(), [good()], seed=7, split="dev", masks="iid", **OPTIONS)
    protocol = scores.protocol
    assert (protocol.plan.num_samples, protocol.plan.seed, protocol.plan.scheme) == (4, 7, "iid")
    assert scores.split == "dev" and protocol.grid == GRID and protocol.num_classes == 3
    assert protocol.sites == (("2", "dropout", 0.5, 1),) and protocol.batched
    assert "K=4" in repr(scores) and "12 targets" in repr(scores)


def test_progress_shows_the_batches(capsys):
    ad.evaluate(mlp(), [good()] * 2, progress=True, **OPTIONS)
    assert "2/2" in capsys.readouterr().err


def test_an_input_that_is_not_a_batch_but_has_its_size_is_passed_whole():
    class Product(nn.Module):
        """Multiplies by a matrix whose side happens to equal the batch size."""

        def __init__(self):
            super().__init__()
            self.inner = mlp(N, 7, 3)

        def forward(self, x, matrix):
            return self.inner(x @ matrix)

    model = Product().eval()
    x, y, matrix = torch.randn(N, N), torch.randint(3, (N,)), torch.randn(N, N)
    small, large = (
        ad.evaluate(model, [((x, matrix), y)], memory=memory, **OPTIONS) for memory in (2**20, None)
    )
    assert_same(small, large)
    assert not large.protocol.batched  # twice the rows would be a product of other sizes
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(x, matrix), y, reduction="none")
    torch.testing.assert_close(large.values(ad.DET).whole.float(), expected)
