"""A mixture of softmaxes: its log-probabilities, its gradient, sizes, names and refusals."""

import dataclasses

import numpy as np
import pytest
import torch
from watcher import Watcher

from afterdrop.models import (
    LanguageModel,
    LanguageModelConfig,
    ModelError,
    count_parameters,
    mixture_targets,
    sizes_within,
    softmax_mixture,
)
from afterdrop.models.fused import why_not_fused
from afterdrop.models.mixture_targets import target_log_probs
from afterdrop.models.softmax_mixture import mixture_log_probs
from oracles import lstm as oracle

MIXED = LanguageModelConfig(
    7, (4, 4), 3, softmax_components=3, output_dropout=0.5, projection_dropout=0.25
)


def parts(rows=5, components=3, classes=7, size=2, dtype=torch.float64):
    """Latent vectors, prior logits, table and bias, and targets."""
    made = [
        torch.randn(shape, dtype=dtype, requires_grad=True)
        for shape in ((rows, components, size), (rows, components), (classes, size), (classes,))
    ]
    return made, torch.randint(classes, (rows,))


def by_probabilities(latent, prior, table, bias, temperature=1.0):
    """The equation, with probabilities: log Σ_k π_k softmax(z_k tableᵀ + b)."""
    probabilities = ((latent @ table.t() + bias) / temperature).softmax(-1)
    return (prior.softmax(-1).unsqueeze(-1) * probabilities).sum(-2).log()


@pytest.mark.parametrize("at_once", [1, 50, 2**20])
def test_log_probabilities_do_not_depend_on_how_many_rows_run_at_once(monkeypatch, at_once):
    given, _ = parts()
    monkeypatch.setattr(softmax_mixture, "_AT_ONCE", {"cpu": at_once})
    found = mixture_log_probs(*given)
    torch.testing.assert_close(found, by_probabilities(*given))
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(5, dtype=torch.float64))


def test_log_probabilities_hold_where_probabilities_underflow():
    latent = torch.tensor([[[1.0], [2.0]]])
    table = torch.tensor([[0.0], [-200.0]])
    prior = torch.tensor([[0.0, -300.0]])
    found = mixture_log_probs(latent, prior, table, torch.zeros(2))
    torch.testing.assert_close(found, torch.tensor([[0.0, -200.0]]))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.9])
def test_a_temperature_divides_the_logits_of_components_and_leaves_the_prior(temperature):
    model = LanguageModel(dataclasses.replace(MIXED, embedding_size=2)).double().eval()
    y = torch.randn(2, 3, 4, dtype=torch.float64)
    own = {n: p.detach().numpy() for n, p in model.named_parameters()}
    wanted = oracle.mixture_of_softmaxes(y.numpy(), own["embedding"], own, None, temperature)
    with model.mixture.tempered(temperature):
        found = model.output(model.mixture(y))
    assert model.mixture.temperature == 1
    np.testing.assert_allclose(found.detach().numpy(), wanted, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 50, 2**20])
def test_gradient_from_the_component_weights_is_that_of_the_mixture(monkeypatch, at_once):
    given, targets = parts()
    monkeypatch.setattr(mixture_targets, "_AT_ONCE", {"cpu": at_once})
    weights = torch.randn(5, dtype=torch.float64)  # every row has its own
    whole = by_probabilities(*given).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    wanted = torch.autograd.grad(whole @ weights, given)
    own = target_log_probs(*given, targets)
    found = torch.autograd.grad(own @ weights, given)
    torch.testing.assert_close(own, whole)
    for got, want in zip(found, wanted):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_training_never_holds_the_logits_of_all_rows(monkeypatch):
    """The largest tensor of a step has the logits of one row here, not of all 40."""
    monkeypatch.setattr(mixture_targets, "_AT_ONCE", {"cpu": 1})
    given, targets = parts(rows=40, components=3, classes=500)
    largest = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            largest.append(out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    with Largest():
        target_log_probs(*given, targets).sum().backward()
    assert max(largest) == 3 * 500


def test_the_model_gives_log_probabilities_and_those_of_targets_alone():
    model = LanguageModel(MIXED).double().eval()
    tokens, targets = torch.randint(7, (2, 2, 5))
    found, state = model(tokens)
    torch.testing.assert_close(found.logsumexp(-1), torch.zeros(2, 5, dtype=torch.float64))
    activations = model.activations(tokens)
    alone = model.target_log_probs(activations, targets)
    torch.testing.assert_close(alone, found.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(activations.state, state)
    features, _ = model.features(tokens)
    assert features.shape == (2, 5, 3 * 3 + 3)
    torch.testing.assert_close(model.output(features), found)


def test_masked_rows_of_the_table_reach_both_forms():
    rows = {"embedding_dropout": 0.5, "embedding_rows": "input_and_softmax"}
    model = LanguageModel(dataclasses.replace(MIXED, **rows)).double()
    tokens, targets = torch.randint(7, (2, 2, 5))
    with Watcher(model, 3):
        found, _ = model(tokens)
    with Watcher(model, 3):
        alone = model.target_log_probs(model.activations(tokens), targets)
    torch.testing.assert_close(alone, found.gather(-1, targets.unsqueeze(-1)).squeeze(-1))


def test_latent_dropout_is_a_site_with_a_telling_name():
    model = LanguageModel(MIXED)
    with Watcher(model) as watcher:
        model(torch.zeros(2, 3, dtype=torch.int64))
    assert list(watcher.masks) == ["output_dropout", "mixture.projection_dropout"]
    assert watcher.masks["mixture.projection_dropout"].shape == (3, 2, 9)
    assert LanguageModel(dataclasses.replace(MIXED, projection_dropout=None)).mixture is not None


def test_initial_weights_have_the_fan_in_of_the_stack():
    config = LanguageModelConfig(9, (64,), 500, softmax_components=4)
    model = LanguageModel(config, torch.Generator().manual_seed(1))
    # 128 000 draws: the standard error of the standard deviation is 0.2 percent.
    assert abs(model.mixture.projection.std().item() * 8 - 1) < 0.008
    assert abs(model.mixture.prior.std().item() * 8 - 1) < 0.2  # 256 draws
    assert not model.mixture.projection_bias.any()
    before = model.mixture.prior.clone()
    model.reset_parameters(torch.Generator().manual_seed(2))
    assert not torch.equal(model.mixture.prior, before)


def test_budget_gives_the_published_sizes():
    # Mogrifier LSTM, WikiText-2 with two components.
    ratio = 428 / 1211
    found = sizes_within(35_000_000, 33_279, 2, embedding_ratio=ratio, softmax_components=2)
    assert found == (1211, 428, 34_997_757)
    rounds = {"mogrifier_rounds": 6, "mogrifier_rank": 48}
    config = LanguageModelConfig(33_279, (1366, 1366), 272, softmax_components=2, **rounds)
    assert count_parameters(config) == 34_991_825
    ratio = 272 / 1366
    found = sizes_within(
        35_000_000, 33_279, 2, embedding_ratio=ratio, softmax_components=2, **rounds
    )
    assert found == (1366, 272, 34_991_825)


@pytest.mark.parametrize(
    "vocabulary, sizes, embedding, wanted",
    [
        (10_000, (960, 960, 620), 280, 21_500_620),
        (33_278, (1150, 1150, 650), 300, 34_909_528),
    ],
)
def test_counts_of_the_mixture_paper(vocabulary, sizes, embedding, wanted):
    config = LanguageModelConfig(
        vocabulary, sizes, embedding, softmax_components=15, stacking="plain"
    )
    second_bias = 4 * sum(sizes)  # torch's LSTM has two biases per gate
    assert count_parameters(config) == wanted - second_bias


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_components_are_a_positive_whole_number(value):
    with pytest.raises(ModelError, match="softmax_components is"):
        dataclasses.replace(MIXED, softmax_components=value)


def test_one_softmax_has_no_targets_alone_and_kernels_know_a_mixture():
    one = dataclasses.replace(MIXED, softmax_components=1)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    model = LanguageModel(one)
    with pytest.raises(ModelError, match=r"softmax_components is 1.*Call the model itself"):
        model.target_log_probs(model.activations(tokens), tokens)
    assert model.mixture is None and why_not_fused(one) is None
    assert why_not_fused(MIXED) is None
