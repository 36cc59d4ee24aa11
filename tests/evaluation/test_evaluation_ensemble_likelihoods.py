"""Ensembles of labels and numbers: means, errors, choice and predictor, against float64 oracles."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.evaluation.scores import schema
from oracles import family as oracle
from oracles.densities import Density, gaussians
from oracles.poisson import Poisson

K, N, LABELS = 3, 8, 2
GRID = ad.Grid((0.0, 0.5, 1.0))
LIKELIHOODS = ("binary", "multilabel", "gaussian", "squared_error")
OF_LABELS, OF_NUMBERS = LIKELIHOODS[:2], LIKELIHOODS[2:]


class Heads(nn.Module):
    """A network with the outputs that a likelihood needs."""

    def __init__(self, kind, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Dropout(0.4))
        self.head, self.kind = nn.Linear(12, LABELS), kind
        self.double()

    def forward(self, x):
        found = 2 * self.head(self.body(x))
        if self.kind == "gaussian":
            return found[:, 0], nn.functional.softplus(found[:, 1]) + 0.2
        return found if self.kind == "multilabel" else found[:, 0]


def models_of(kind):
    return [Heads(kind, seed).eval() for seed in range(K)]


def data_of(kind):
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(N, 4, generator=rng, dtype=torch.float64)
    shape = (N, LABELS) if kind == "multilabel" else (N,)
    numbers = torch.randn(shape, generator=rng, dtype=torch.float64)
    y = numbers if kind in OF_NUMBERS else (numbers > 0).long()
    return x, y, [(x[:5], y[:5]), (x[5:], y[5:])]


def stored(kind):
    """The samples as `evaluate_samples` takes them."""
    with torch.no_grad():
        found = [model(data_of(kind)[0]) for model in models_of(kind)]
    pairs = [torch.stack(out, -1) if isinstance(out, tuple) else out for out in found]
    return torch.stack(pairs).numpy()


def label_log_probs(kind):
    """[K, N, 2] of 0 and 1, and the targets."""
    z = stored(kind).reshape(K, -1)
    y = data_of(kind)[1].flatten().numpy()
    return oracle.log_softmax(np.stack([np.zeros_like(z), z], -1)), y


@pytest.fixture(scope="module")
def scores():
    return {
        kind: ad.evaluate(models_of(kind), data_of(kind)[2], grid=GRID, likelihood=kind)
        for kind in LIKELIHOODS
    }


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_tensors_and_protocol_are_complete_and_can_be_saved(scores, kind, tmp_path):
    found = scores[kind]
    schema.check(found.tensors, found.protocol)
    found.save(tmp_path / "scores")
    assert ad.Scores.load(tmp_path / "scores").xe(ad.AMC) == found.xe(ad.AMC)


@pytest.mark.parametrize("kind", OF_LABELS)
def test_labels_are_those_of_the_oracle(scores, kind):
    lp, y = label_log_probs(kind)
    for alpha in GRID.alphas:
        for temperature in (1.0, 1.7):
            expected = -oracle.at(oracle.member_log_probs(lp, alpha, temperature), y)
            member = ad.Member(alpha, 1.0, temperature)
            np.testing.assert_allclose(scores[kind].values(member).whole, expected, atol=2e-5)
    alone = [-oracle.at(one, y).mean() for one in lp]
    np.testing.assert_allclose(scores[kind].protocol.ensemble.single_xe, alone, atol=1e-6)
    assert scores[kind].num_examples == N
    if kind == "multilabel":
        assert scores[kind].field("data", "labels").tolist() == [0, 1] * N


def numbers_at(kind, scores):
    """Means and variances [K, N] at T = 1."""
    found = stored(kind)
    if kind == "gaussian":
        return found[..., 0], found[..., 1]
    return found, np.full_like(found, scores.noise_variance)


def mixture_nll(means, variances, y):
    lp = -0.5 * (np.log(2 * np.pi * variances) + (y - means) ** 2 / variances)
    return -oracle.log_power_mean(lp[..., None], 1.0)[..., 0]


def geometric_nll(means, variances, y):
    precision = (1 / variances).mean(0)
    mean = (means / variances).mean(0) / precision
    return 0.5 * (np.log(2 * np.pi / precision) + (y - mean) ** 2 * precision)


@pytest.mark.parametrize("kind", OF_NUMBERS)
def test_numbers_are_those_of_closed_forms_and_integrals(scores, kind):
    found, y = scores[kind], data_of(kind)[1].numpy()
    own = numbers_at(kind, found)
    atol = 1e-9 if kind == "gaussian" else 1e-5  # the noise variance lies between nodes
    for alpha, form in ((0.0, geometric_nll), (1.0, mixture_nll)):
        values = found.values(ad.Member(alpha, 1.0))
        whole = form(*own, y)
        np.testing.assert_allclose(values.whole, whole, atol=atol)
        without = np.stack([form(*(np.delete(part, k, 0) for part in own), y) for k in range(K)])
        halves = whole + (K - 1) * (without - whole)
        np.testing.assert_allclose(values.halves, halves, atol=5e-5)
        error = np.sqrt((K - 1) / K * np.square((without - without.mean(0)).mean(1)).sum())
        assert found.xe(ad.Member(alpha, 1.0)).mc_error == pytest.approx(error, abs=5e-5)
    for target in (0, 3):
        wanted = Density(gaussians(*(part[:, target] for part in own)), 0.5)
        got = found.values(ad.Member(0.5, 1.0)).whole[target].item()
        assert got == pytest.approx(wanted.nll(y[target]), abs=2e-5)
        crps = found.summary(ad.Member(0.5, 1.0), "crps_at")[target].item()
        assert crps == pytest.approx(wanted.crps(y[target]), abs=2e-5)


@pytest.mark.parametrize("kind", OF_NUMBERS)
def test_the_best_model_of_numbers_stands_alone_and_the_mean_member_is_the_bound(scores, kind):
    found, y = scores[kind], data_of(kind)[1].numpy()
    means, variances = numbers_at(kind, found)
    alone = 0.5 * (np.log(2 * np.pi * variances) + (y - means) ** 2 / variances)
    ensemble = found.protocol.ensemble
    np.testing.assert_allclose(ensemble.single_xe, alone.mean(1), atol=1e-6)
    assert ensemble.best == int(np.argmin(alone.mean(1)))
    assert found.xe(ad.DET).value == pytest.approx(alone.mean(1).min(), abs=1e-5)
    if kind == "squared_error":
        assert found.noise_variance == pytest.approx(((y - means) ** 2).mean(1).min(), rel=1e-6)
    choice = ad.select(found, resamples=0, folds=0)
    shown = dict(choice.ensemble.curve)
    assert shown[1] == pytest.approx(alone.mean(), abs=1e-5)
    gain = alone.mean() - found.xe(choice.member).value
    assert choice.ensemble.over_mean.value == pytest.approx(gain, abs=1e-5)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_predictor_is_the_chosen_mean_of_labels_and_numbers(scores, kind):
    found, (x, y, _) = scores[kind], data_of(kind)
    chosen = ad.select(found, resamples=0, folds=0)
    temper = found.protocol.grid.temper
    for member in (ad.Member(0.5, 1.0, 1.3, temper), ad.DET.at_temperature(0.8)):
        choice = dataclasses.replace(chosen, member=member)
        for prediction in (choice.predictor(models_of(kind))(x), choice.combine(stored(kind))):
            if kind in OF_NUMBERS:
                nll = -prediction.log_prob(y)
            else:
                nll = -prediction.gather(-1, y.unsqueeze(-1)).flatten()
            torch.testing.assert_close(nll.double(), found.values(member).whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_stored_samples_give_the_scores_of_the_models(scores, kind):
    bracket = scores[kind].protocol.low, scores[kind].protocol.high
    options = {"grid": GRID, "likelihood": kind, "temperatures": bracket}
    found = ad.evaluate_samples(stored(kind), data_of(kind)[1], **options)
    for name, tensor in scores[kind].tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, atol=1e-5, rtol=0)
    members = ad.evaluate_samples(list(stored(kind)), data_of(kind)[1], **options)
    assert members.xe(ad.AMC) == found.xe(ad.AMC)


def test_masks_of_several_models_of_numbers_are_samples():
    x, y, batches = data_of("gaussian")
    models = models_of("gaussian")[:2]
    grid = ad.Grid((0.0, 1.0), (0, 1))
    found = ad.evaluate(models, batches, grid=grid, num_samples=2, likelihood="gaussian")
    schema.check(found.tensors, found.protocol)
    assert found.num_samples == 4 and found.xe(ad.AMC).mc_error > 0
    choice = dataclasses.replace(ad.select(found, resamples=0, folds=0), member=ad.AMC)
    assert choice.predictor(models)(x).log_prob(y).isfinite().all()


def test_an_own_likelihood_of_models_is_evaluated_and_of_stored_samples_refused():
    x, _, _ = data_of("binary")
    y = torch.arange(N) % 3
    models = models_of("binary")
    found = ad.evaluate(models, [(x, y)], grid=GRID, likelihood=Poisson())
    choice = dataclasses.replace(ad.select(found, resamples=0, folds=0), member=ad.AMC)
    nll = -choice.predictor(models, likelihood=Poisson())(x).log_prob(y)
    torch.testing.assert_close(nll, found.values(ad.AMC).whole, atol=1e-4, rtol=0)
    with pytest.raises(DataError, match="do not say what its model returned; give one of"):
        ad.evaluate_samples(stored("binary"), y, likelihood=Poisson())


def test_stored_samples_that_do_not_fit_their_likelihood_are_refused():
    y = data_of("gaussian")[1]
    pair = stored("gaussian")
    for samples, kind, message in [
        (pair, "squared_error", r"give \[K, \*targets.shape\], or a list"),
        (pair[..., 0], "gaussian", r"do not match targets of shape"),
        (np.repeat(pair, 2, -1), "gaussian", r"4 entries .*numpy.stack\(\[means, variances\], -1"),
        (-pair, "gaussian", r"variances above 0"),
        (np.where(pair > 0, np.nan, pair), "gaussian", "sample 0 gave NaN, infinity"),
        (pair, "gauss", r"likelihood='gauss' is not built in"),
    ]:
        with pytest.raises(DataError, match=message):
            ad.evaluate_samples(samples, y, likelihood=kind)
