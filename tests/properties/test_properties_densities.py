"""The inequalities of the family, for any samples of numbers and labels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import afterdrop as ad
from afterdrop.evaluation.likelihoods.binary import two_classes
from afterdrop.evaluation.likelihoods.density_summaries import Temperatures
from afterdrop.evaluation.likelihoods.density_sums import Rows
from afterdrop.evaluation.likelihoods.parametric import Gaussian, SquaredError
from afterdrop.evaluation.likelihoods.sample_grids import grid_of
from afterdrop.family.grid_distribution import GridDistribution

alphas = st.floats(0.02, 1) | st.sampled_from([0.0, 0.5, 1.0])


@st.composite
def gaussians(draw, same_variance=False):
    """Means and variances [K, 3, 2], of samples that may lie far apart, and targets [3]."""
    count = draw(st.integers(2, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mean = rng.normal(size=(count, 3)) * draw(st.floats(0, 8))
    log_scale = rng.normal(size=(count, 3)) * draw(st.floats(0, 1) | st.just(4.0))
    if same_variance:
        log_scale[:] = 0.0
    parameters = np.stack([mean, np.exp(2 * log_scale)], -1)
    return torch.tensor(parameters), torch.tensor(rng.normal(size=3) * draw(st.floats(0, 10)))


def results(kind, parameters, y, alpha, temperatures):
    spans = [range(len(parameters))]
    return Rows(kind, parameters, y, (alpha,), temperatures, spans).results()


@settings(max_examples=40, deadline=None)
@given(gaussians(), alphas)
def test_objective_is_the_bound_plus_two_gaps_that_are_not_negative(case, alpha):
    parameters, y = case
    found = results(Gaussian(), parameters, y, alpha, Temperatures((1.0,), False))
    jensen, normaliser = found["target"][0] - found["bound"], -found["one"][0]
    scale = 1e-9 * (1 + found["bound"].abs())
    assert (jensen >= -scale).all() and (normaliser >= -1e-8).all()
    objective = -found["nll_at"][0, 0]
    left = objective - (found["bound"] + jensen + normaliser)
    assert (left.abs() <= 1e-8 + 1e-5 * objective.abs() + 1e-15 * found["bound"].abs()).all()
    assert found["quadrature"].max() < 1e-5


@settings(max_examples=40, deadline=None)
@given(gaussians(same_variance=True), alphas, st.floats(0.3, 30))
def test_the_bound_holds_at_every_noise_variance(case, alpha, noise):
    parameters, y = case
    found = results(SquaredError(), parameters, y, alpha, Temperatures((noise,), True))
    normaliser = -found["log_z_at"][0, 0]
    jensen = -found["nll_at"][0, 0] - normaliser - found["bound_at"][0, 0]
    scale = 1e-8 * (1 + found["bound_at"].abs().max())
    assert (jensen >= -scale).all() and (normaliser >= -1e-8).all()


@settings(max_examples=40, deadline=None)
@given(gaussians(), st.floats(0.2, 5))
def test_closed_forms_are_those_of_quadrature(case, temperature):
    """Alpha 0 has a closed form at every temperature; sums over a grid give the same."""
    parameters, y = case
    kind = Gaussian()
    found = results(kind, parameters, y, 0.0, Temperatures((temperature, 1.0), False))
    mean = kind.geometric(parameters).unsqueeze(0)
    grid = grid_of(kind, mean, (temperature, temperature))
    log_f = kind.log_prob(parameters.unsqueeze(-2), grid.points).mean(0) / temperature
    nll = grid.log_integral(log_f) - kind.log_prob(parameters, y).mean(0) / temperature
    assert torch.allclose(found["nll_at"][0, 0], nll, rtol=1e-7, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(gaussians(), alphas)
def test_crps_is_at_most_the_absolute_error_of_a_number_and_not_negative(case, alpha):
    """CRPS = E|Y − y| − ½ E|Y − Y′|, where 0 ≤ ½ E|Y − Y′| ≤ E|Y − y|."""
    parameters, y = case
    kind = Gaussian()
    grid = grid_of(kind, parameters, (1.0, 1.0))
    lp = kind.log_prob(parameters.unsqueeze(-2), grid.points)
    found = GridDistribution(grid, ad.log_power_mean(lp, alpha))
    distance = grid.integral(found.f * (grid.points - y.unsqueeze(-1)).abs())
    scale = 1e-3 * (1 + distance)
    assert (found.crps(y) >= -1e-6 * (1 + distance)).all()
    assert (found.crps(y) <= distance + scale).all()
    shares = torch.tensor([[0.05], [0.5], [0.9]], dtype=torch.float64).expand(3, 3)
    assert torch.allclose(found.cdf(found.quantile(shares)), shares, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.floats(0, 20), st.integers(0, 2**32), alphas)
def test_labels_have_the_bound_and_both_gaps(count, spread, seed, alpha):
    z = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed)).double() * spread
    lp = two_classes(z).log_softmax(-1)
    log_mean = ad.log_power_mean(lp, alpha)
    gap = log_mean[..., 1] - lp[..., 1].mean(0)
    scale = 1e-9 * (1 + lp.abs().max())
    assert (gap >= -scale).all() and (log_mean.logsumexp(-1) <= scale).all()
    if alpha == 0:  # the mean of the logits
        odds = log_mean[..., 1] - log_mean[..., 0]
        assert odds.numpy() == pytest.approx(z.mean(0).numpy(), abs=1e-9)
