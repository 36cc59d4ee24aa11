"""Samples that are far narrower than the distances between them: no peak is missed."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods.density_summaries import Temperatures
from afterdrop.evaluation.likelihoods.density_sums import Rows
from afterdrop.evaluation.likelihoods.parametric import Gaussian
from afterdrop.evaluation.likelihoods.predictive import Predictive
from afterdrop.evaluation.likelihoods.sample_grids import grid_of
from afterdrop.family.cell_grid import CellGrid

Y = 2.0005
PAIR = torch.tensor([[[2.0, 1e-6]], [[-2.0, 1.0]]], dtype=torch.float64)  # N(2, 1e-6), N(−2, 1)


def results(parameters, y, alphas, temperatures=(1.0,)):
    spans = [range(len(parameters))]
    kept = Temperatures(temperatures, False)
    return Rows(Gaussian(), parameters, y, alphas, kept, spans).results()


def mixture_crps(means, scales, y, weights=None):
    """E|Y − y| − ½ E|Y − Y′| of a mixture of normal distributions (Grimit et al., 2006)."""
    weights = np.full(len(means), 1 / len(means)) if weights is None else weights

    def distance(mean, scale):
        return 2 * scale * norm.pdf(mean / scale) + mean * (2 * norm.cdf(mean / scale) - 1)

    both = np.sqrt(np.square(scales)[:, None] + np.square(scales))
    apart = weights @ distance(means[:, None] - means, both) @ weights
    return weights @ distance(y - means, scales) - apart / 2


def of_pair(alpha):
    """NLL and CRPS of PAIR at Y: (√p + √q)² is a mixture of p, q and their geometric mean."""
    means, scales = np.array([2.0, -2.0]), np.array([1e-3, 1.0])
    lp = norm(means, scales).logpdf(Y)
    if alpha == 1:
        return math.log(2) - np.logaddexp(*lp), mixture_crps(means, scales, Y)
    total = np.square(scales).sum()
    overlap = math.sqrt(2 * scales.prod() / total) * math.exp(
        -((means[0] - means[1]) ** 2) / 4 / total
    )
    mean, variance = Gaussian().geometric(PAIR)[0].tolist()
    weights = np.array([0.25, 0.25, 0.5 * overlap])
    log_mean = 2 * math.log(np.exp(lp / 2).mean())
    means, scales = np.append(means, mean), np.append(scales, math.sqrt(variance))
    crps = mixture_crps(means, scales, Y, weights / weights.sum())
    return math.log(weights.sum()) - log_mean, crps


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_a_narrow_peak_counts_for_what_it_is(alpha):
    """A uniform grid of 4,097 points gave an NLL of −5.67 and a CRPS of 2.34."""
    found = results(PAIR, torch.tensor([Y], dtype=torch.float64), (alpha,))
    nll, crps = of_pair(alpha)
    assert found["nll_at"].item() == pytest.approx(nll, abs=1e-7)
    assert found["crps_at"].item() == pytest.approx(crps, abs=1e-6)
    assert found["quadrature"].item() < 1e-6
    assert -found["one"].item() >= 0


@pytest.mark.parametrize("seed", range(4))
def test_mixtures_have_the_moments_and_crps_of_closed_forms(seed):
    rng = np.random.default_rng(seed)
    means, scales = rng.normal(size=(7, 5)) * 10, np.exp(rng.normal(size=(7, 5)) * 4 - 4)
    parameters = torch.tensor(np.stack([means, scales**2], -1))
    y = torch.tensor(means[0] + scales[0])
    assert isinstance(grid_of(Gaussian(), parameters, (1.0, 1.0)), CellGrid)
    found = results(parameters, y, (0.25, 1.0), (1 / 8, 8.0, 1.0))
    mean = means.mean(0)
    variance = (scales**2 + means**2).mean(0) - mean**2
    crps = [mixture_crps(m, s, t) for m, s, t in zip(means.T, scales.T, y.numpy())]
    assert found["mean_at"][1, -1].numpy() == pytest.approx(mean, abs=1e-6)
    assert found["variance_at"][1, -1].numpy() == pytest.approx(variance, rel=1e-5)
    assert found["crps_at"][1, -1].numpy() == pytest.approx(crps, rel=1e-5, abs=1e-5)
    entropy = (0.5 * np.log(2 * math.pi * math.e) + np.log(scales)).mean(0)
    assert found["mean_entropy"].numpy() == pytest.approx(entropy, abs=1e-5)
    assert found["quadrature"].max() < 1e-4 and found["one"].max() < 1e-8
    cdf = norm(means, scales).cdf(y.numpy()).mean(0)
    predicted = Predictive(Gaussian(), parameters, 1.0)
    assert found["cdf_at"][1, -1].numpy() == pytest.approx(cdf, abs=1e-5)
    assert predicted.cdf(y).numpy() == pytest.approx(cdf, abs=1e-5)
    shares = torch.tensor([[0.05], [0.5], [0.9]], dtype=torch.float64).expand(3, 5)
    assert torch.allclose(predicted.cdf(predicted.quantile(shares)), shares, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_densities_with_a_closed_form_are_exact(alpha):
    """They need no grid: however narrow a sample is, no integral is wrong."""
    narrow = PAIR.clone()
    narrow[0, 0, 1] = 1e-40
    found = Predictive(Gaussian(), narrow, alpha)
    lp = Gaussian().log_prob(narrow, torch.tensor(2.0, dtype=torch.float64))
    mean = Gaussian().geometric(narrow)
    closed = (
        lp.logsumexp(0) - math.log(2) if alpha else Gaussian().log_prob(mean, torch.tensor(2.0))
    )
    assert found.log_prob(2.0).item() == pytest.approx(closed.item(), abs=1e-12)


def test_integrals_that_would_be_wrong_are_refused():
    narrow = PAIR.clone()
    narrow[0, 0, 1] = 1e-40
    with pytest.raises(DataError, match=r"are off by .* nats.*give variances a lower limit"):
        results(narrow, torch.tensor([Y], dtype=torch.float64), (0.5,))
    with pytest.raises(DataError, match="are off by"):
        _ = Predictive(Gaussian(), narrow, 0.5).mean


class Switch(nn.Module):
    """Half of the masks give N(2, 1e-6), half N(−2, 1); rows with x = 0 have one width."""

    def __init__(self):
        super().__init__()
        self.unit, self.dropout = nn.Linear(1, 1), nn.Dropout(0.5)
        nn.init.ones_(self.unit.bias)
        nn.init.zeros_(self.unit.weight)

    def forward(self, x):
        kept = (self.dropout(self.unit(x)).squeeze(-1) > 0).float()
        exponent = -6 * kept * (x.squeeze(-1) != 0)
        return 4 * kept - 2, 10**exponent


def test_narrow_and_other_targets_of_an_evaluation_are_as_if_each_were_alone():
    x = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    y = torch.tensor([1.0, Y, -1.0, -2.3])
    grid = ad.Grid((0.0, 0.5, 1.0), (0, 1))
    scores = ad.evaluate(Switch(), [(x, y)], likelihood="gaussian", num_samples=16, grid=grid)
    for member in scores.members[1:]:
        bounds = scores.bounds(member)
        assert bounds.normaliser_gap >= -1e-9 and bounds.jensen_gap >= -1e-9
        assert scores.quadrature_error(member) < 1e-5
    # A Latin hypercube drops the unit in half of the samples.
    member = ad.Member(0.5, 1)
    nll, crps = of_pair(0.5)
    assert scores.values(member).whole[1].item() == pytest.approx(nll, abs=1e-3)
    assert scores.summary(member, "crps_at")[1].item() == pytest.approx(crps, abs=1e-3)
    same = torch.tensor([[[2.0, 1.0]], [[-2.0, 1.0]]], dtype=torch.float64)
    wanted = results(same, torch.tensor([-1.0], dtype=torch.float64), (0.5,))
    assert scores.values(member).whole[2].item() == pytest.approx(wanted["nll_at"].item(), abs=1e-6)
