"""Uncertainty of predicted numbers: all masks of small nets, closed forms, and errors."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import afterdrop as ad
from afterdrop.errors import MemberError
from afterdrop.evaluation.likelihoods.density_reading import DensityReading
from afterdrop.evaluation.likelihoods.parametric import Gaussian
from afterdrop.selection.number_uncertainty import number_uncertainty
from oracles import family as oracle
from oracles.poisson import Poisson

FIELDS = ("mean", "variance", "expected_variance", "variance_of_means")
UNITS, RATE, NOISE = 4, 0.5, 0.3
MEMBERS = [
    ad.Member(alpha, 1, temperature, temper)
    for alpha in (0.0, 0.5, 1.0)
    for temperature, temper in ((1.0, "mean"), (1.7, "mean"), (1.7, "sample"))
]


class Heads(nn.Module):
    """Four hidden units with dropout, then a mean and, if asked for, a variance."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.dropout = nn.Linear(3, UNITS), nn.Dropout(RATE)
        self.out, self.kind = nn.Linear(UNITS, 2), kind

    def forward(self, x):
        return self.head(self.dropout(self.hidden(x).relu()))

    def head(self, features):
        mean, raw = self.out(features).unbind(-1)
        return (mean, (raw / 2).exp()) if self.kind == "gaussian" else mean


def inputs():
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(1))


def all_masks(kind):
    """Means and variances [16, B] under each of the masks, which are equally likely."""
    model, found = Heads(kind).double(), []
    hidden = model.hidden(inputs().double()).relu()
    for mask in itertools.product((0.0, 1 / (1 - RATE)), repeat=UNITS):
        out = model.head(hidden * torch.tensor(mask, dtype=torch.float64))
        pair = out if kind == "gaussian" else (out, torch.full_like(out, NOISE))
        found.append(torch.stack(pair).detach())
    return torch.stack(found).movedim(0, 1).numpy()


def moments(means, variances, member):
    """Mean and variance of a member of normal distributions, by a sum over many points."""
    if member.temper == "sample":
        variances = variances * member.temperature
    reach = 12 * np.sqrt(variances.max() * member.temperature)
    points = np.linspace(means.min() - reach, means.max() + reach, 20001)
    log_mean = oracle.log_power_mean(
        norm.logpdf(points, *(t[:, None] for t in (means, np.sqrt(variances)))), member.alpha
    )
    p = np.exp(log_mean / (member.temperature if member.temper == "mean" else 1.0))
    p /= p.sum()
    return p @ points, p @ np.square(points - p @ points)


def restated(kind, member):
    means, variances = all_masks(kind)
    both = np.array([moments(*pair, member) for pair in zip(means.T, variances.T)])
    each = member.temperature if member.temper == "sample" else 1.0
    return {
        "mean": both[:, 0],
        "variance": both[:, 1],
        "expected_variance": each * variances.mean(0),
        "variance_of_means": means.var(0),
    }


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_all_masks_give_the_exact_values(member):
    means, variances = all_masks("gaussian")
    samples = torch.tensor(np.stack([means, variances], -1)).movedim(0, -2)  # [B, K, P]
    found = number_uncertainty(DensityReading(Gaussian()), samples, member, spans=[range(16)])
    for name, value in restated("gaussian", member).items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-6, atol=1e-8, err_msg=name)
    assert found.errors is None
    if member == ad.AMC:
        total = found.expected_variance + found.variance_of_means
        torch.testing.assert_close(found.variance, total, rtol=1e-9, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["gaussian", "squared_error"])
def test_predictors_tend_to_the_values_of_all_masks(kind, alpha):
    member = ad.Member(alpha, 1, temper="sample" if kind == "squared_error" else "mean")
    noise = NOISE if kind == "squared_error" else None
    options = {"masks": "iid", "blocks": 8, "likelihood": kind, "noise_variance": noise}
    predict = ad.Predictor(Heads(kind), member, 512, **options)
    found, made, wanted = predict.uncertainty(inputs()), predict(inputs()), restated(kind, member)
    torch.testing.assert_close(found.mean, made.mean)
    torch.testing.assert_close(found.variance, made.variance)
    for name in FIELDS:
        gap = getattr(found, name).numpy() - wanted[name]
        error = getattr(found.errors, name).numpy()
        assert (np.abs(gap) < 6 * error + 1e-4).all(), name
    if kind == "squared_error":
        assert torch.allclose(found.expected_variance, torch.tensor(NOISE).double())


@pytest.mark.parametrize("kind", ["gaussian", "squared_error"])
def test_samples_are_the_parameters_that_the_member_averages(kind):
    noise = NOISE if kind == "squared_error" else None
    options = {"likelihood": kind, "noise_variance": noise}
    member = ad.Member(1, 1, 2.0, "sample")
    predict = ad.Predictor(Heads(kind), member, 6, **options)
    samples = predict.samples(inputs())
    assert samples.shape == (6, 3, 2) and samples.dtype == torch.float64
    assert torch.equal(torch.cat(list(predict.stream_samples(inputs()))), samples)
    found, (means, variances) = predict.uncertainty(inputs()), samples.unbind(-1)
    torch.testing.assert_close(found.mean, means.mean(0), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.expected_variance, variances.mean(0))
    torch.testing.assert_close(found.variance_of_means, means.var(0, correction=0))
    cold = ad.Predictor(Heads(kind), ad.Member(1, 1, 1.0, "sample"), 6, **options)
    torch.testing.assert_close(cold.samples(inputs())[..., 1] * 2, variances)


def test_without_dropout_nothing_varies():
    predict = ad.Predictor(Heads("gaussian"), ad.DET.at_temperature(1.5), likelihood="gaussian")
    found, (mean, variance) = predict.uncertainty(inputs()), Heads("gaussian").eval()(inputs())
    torch.testing.assert_close(found.mean, mean.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.expected_variance, 1.5 * variance.double(), rtol=1e-6, atol=0)
    for name in FIELDS:
        assert not getattr(found.errors, name).any()
    assert not found.variance_of_means.any()
    assert predict.samples(inputs()).shape == (1, 3, 2)


def test_a_users_own_likelihood_has_them_too():
    """Its moments are sums; the variance of a Poisson distribution is its mean."""
    predict = ad.Predictor(Heads("poisson"), ad.AMC, 6, likelihood=Poisson())
    found = predict.uncertainty(inputs())
    rates = predict.samples(inputs())[..., 0].exp()
    torch.testing.assert_close(found.expected_variance, rates.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.variance_of_means, rates.var(0, correction=0))
    hot = ad.Predictor(Heads("poisson"), ad.Member(1, 1, 2.0, "sample"), 6, likelihood=Poisson())
    assert (hot.uncertainty(inputs()).expected_variance > found.expected_variance).all()
    with pytest.raises(MemberError, match="samples of poisson at temperature=2 have no parameters"):
        hot.samples(inputs())
