"""Inputs and targets that a model does not take as they are: an error that names the remedy."""

import pytest
import torch
from contract_cases import OPTIONS, N, good
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, SiteError
from oracles.zoo import mlp


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = mlp()


class OfBatch(Inner):
    def forward(self, batch):
        return self.inner(batch["x"])


class OfPair(Inner):
    def forward(self, pair):
        return self.inner(pair[0] + pair[1])


class Loss(Inner):
    """Needs its targets in train mode."""

    def forward(self, x, targets=None):
        if self.training and targets is None:
            raise ValueError("targets are needed in training")
        return self.inner(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(5, 4, 2, dropout=0.3), nn.Linear(4, 3)

    def forward(self, packed):
        return self.out(self.rnn(packed)[1][0][-1])


def assert_same_deterministic(a, b):
    """Masks depend on the names of modules, deterministic values do not."""
    assert a.members == b.members
    assert torch.equal(a.values(ad.DET).whole, b.values(ad.DET).whole)


def test_a_dictionary_that_forward_takes_as_one_argument_is_given_in_a_tuple():
    x, y = good()
    model = OfBatch()
    with pytest.raises(
        DataError, match=r"forward\(batch\).*takes the dict itself, give \(inputs,\)"
    ):
        ad.evaluate(model, [({"x": x}, y)], **OPTIONS)
    found = ad.evaluate(model, [(({"x": x},), y)], **OPTIONS)
    assert_same_deterministic(found, ad.evaluate(model.inner, [(x, y)], **OPTIONS))


def test_a_pair_that_forward_takes_as_one_argument_is_given_in_a_tuple():
    x, y = good()
    with pytest.raises(
        DataError, match=r"forward\(pair\).*takes the tuple itself, give \(inputs,\)"
    ):
        ad.evaluate(OfPair(), [((x, x), y)], **OPTIONS)
    assert ad.evaluate(OfPair(), [(((x, x),), y)], **OPTIONS).num_targets == N


@pytest.mark.parametrize("inputs", [{"y": 1}, (1, 2, 3)])
def test_inputs_that_forward_does_not_have_are_refused(inputs):
    with pytest.raises(DataError, match="a tuple holds positional inputs, a dict keyword inputs"):
        ad.evaluate(Loss(), [(inputs, good()[1])], **OPTIONS)


def test_targets_that_forward_needs_in_train_mode_are_asked_for():
    x, y = good()
    model = Loss()
    for run in (
        lambda: ad.evaluate(model, [(x, y)], **OPTIONS),
        lambda: ad.Predictor(model, ad.AMC, 4)(x),
    ):
        with pytest.raises(SiteError, match=r"targets are needed in training.*among the inputs"):
            run()
    found = ad.evaluate(model, [({"x": x, "targets": y}, y)], **OPTIONS)
    assert_same_deterministic(found, ad.evaluate(model.inner, [(x, y)], **OPTIONS))


def test_the_error_of_a_model_that_fails_in_any_mode_is_its_own():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        ad.evaluate(mlp(), [(torch.randn(N, 4), good()[1])], **OPTIONS)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"packed": x}])
def test_packed_sequences_are_packed_in_forward(wrap):
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 5), torch.randn(2, 5)])
    model = Recurrent()
    for run in (
        lambda: ad.evaluate(model, [(wrap(packed), torch.tensor([0, 1]))], **OPTIONS),
        lambda: ad.Predictor(model, ad.AMC, 4)(packed),
        lambda: ad.Predictor(model, ad.DET)(packed),
        lambda: ad.find_sites(model, packed),
    ):
        with pytest.raises(DataError, match=r"PackedSequence.*pack_padded_sequence"):
            run()


def test_models_and_inputs_without_values_are_refused():
    x, y = good()
    model = mlp().to("meta")
    for run in (
        lambda: ad.evaluate(model, [(x, y)], **OPTIONS),
        lambda: ad.evaluate(mlp(), [(x.to("meta"), y)], **OPTIONS),
        lambda: ad.Predictor(model, ad.AMC, 4)(x),
        lambda: ad.Predictor(model, ad.DET)(x.to("meta")),
        lambda: ad.find_sites(model, x.to("meta")),
    ):
        with pytest.raises(ad.AfterdropError, match=r"meta device.*load"):
            run()


@pytest.mark.parametrize(
    ("targets", "kind"),
    [([{"boxes": torch.zeros(4)}] * N, "list of dict"), ({"y": torch.zeros(N)}, "dict")],
)
def test_targets_of_other_kinds_are_refused(targets, kind):
    with pytest.raises(DataError, match=f"targets of batch 0 are {kind}; give class numbers"):
        ad.evaluate(mlp(), [(good()[0], targets)], **OPTIONS)
