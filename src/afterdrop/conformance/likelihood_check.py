"""Tests that a likelihood of one's own must pass; subclass `LikelihoodConformance` in pytest.

class TestPoisson(LikelihoodConformance):
    likelihood = Poisson()

    def parameters(self, generator):
        return torch.randn(6, 5, 1, generator=generator)  # K samples of 5 targets

    def targets(self, generator):
        return torch.randint(0, 8, (5,), generator=generator)
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.predictive import Predictive
from afterdrop.evaluation.likelihoods.sample_grids import grid_of
from afterdrop.family.grid_distribution import GridDistribution
from afterdrop.family.power_mean import log_power_mean

ALPHAS = (0.0, 0.3, 0.5, 1.0)
TEMPERATURES = (0.5, 1.0, 2.0)


class LikelihoodConformance(abc.ABC):
    """What the family relies on, as tests.

    Attributes:
        likelihood: The likelihood.
        tolerance: By how much sums over all numbers may be off (nats).
    """

    likelihood: ParametricLikelihood
    tolerance: float = 1e-5

    @abc.abstractmethod
    def parameters(self, generator: torch.Generator) -> Tensor:
        """Parameters [K, R, P] of some samples of some targets."""

    @abc.abstractmethod
    def targets(self, generator: torch.Generator) -> Tensor:
        """Targets [R]."""

    def _case(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return self.parameters(generator).double(), self.targets(generator).double()

    def test_it_has_a_name_of_its_own(self) -> None:
        """Requests and files call it by this name."""
        name = self.likelihood.name
        assert isinstance(name, str) and name, "give the likelihood a name"

    def test_log_densities_broadcast_over_samples(self) -> None:
        """Parameters [K, R, P] and numbers [R] give [K, R]."""
        parameters, y = self._case()
        found = self.likelihood.log_prob(parameters, y)
        assert found.shape == parameters.shape[:-1], "log_prob must broadcast parameters and y"
        assert found.dtype == torch.float64, "log_prob must keep float64"
        assert not bool(found.isnan().any()), "log_prob must not be NaN"

    def test_each_sample_sums_to_one(self) -> None:
        """The support covers every sample, in steps that are small enough."""
        parameters, _ = self._case()
        grid = grid_of(self.likelihood, parameters, (1.0, 1.0))
        for sample in parameters:
            lp = self.likelihood.log_prob(sample.unsqueeze(-2), grid.points)
            assert float(grid.log_integral(lp).abs().max()) < self.tolerance

    def test_both_gaps_are_not_negative(self) -> None:
        """Z is at most 1, and the bound is at most the member's log-density."""
        parameters, y = self._case()
        grid = grid_of(self.likelihood, parameters, (1.0, 1.0))
        lp = self.likelihood.log_prob(parameters.unsqueeze(-2), grid.points)
        at_y = self.likelihood.log_prob(parameters, y)
        for alpha in ALPHAS:
            assert float(grid.log_integral(log_power_mean(lp, alpha)).max()) < self.tolerance
            gap = log_power_mean(at_y, alpha) - at_y.mean(0)
            assert float(gap.nan_to_num(0.0).min()) > -self.tolerance

    def test_the_geometric_mean_is_that_of_the_densities(self) -> None:
        """`geometric` differs from the mean of log-densities by a constant, log Z ≤ 0."""
        parameters, _ = self._case()
        mean = self.likelihood.geometric(parameters)
        if mean is None:
            return
        grid = grid_of(self.likelihood, parameters, (1.0, 1.0))
        closed = self.likelihood.log_prob(mean.unsqueeze(-2), grid.points)
        lp = self.likelihood.log_prob(parameters.unsqueeze(-2), grid.points).mean(0)
        difference = (lp - closed).where(closed > -50, torch.nan)
        spread = difference - difference.nanmean(-1, keepdim=True)
        assert float(spread.nan_to_num(0.0).abs().max()) < self.tolerance

    def test_tempered_parameters_are_those_of_the_power(self) -> None:
        """`tempered` differs from log p/T by a constant."""
        parameters, _ = self._case()
        for temperature in TEMPERATURES:
            closed = self.likelihood.tempered(parameters[0], temperature)
            if closed is None:
                return
            grid = grid_of(self.likelihood, parameters, (1.0, 1.0))
            lp = self.likelihood.log_prob(closed.unsqueeze(-2), grid.points)
            power = self.likelihood.log_prob(parameters[0].unsqueeze(-2), grid.points) / temperature
            difference = (lp - power).where(lp > -50, torch.nan)
            spread = difference - difference.nanmean(-1, keepdim=True)
            assert float(spread.nan_to_num(0.0).abs().max()) < self.tolerance

    def test_means_of_quantiles_are_quantiles(self) -> None:
        """`quantile_mean` has the means of the samples' quantiles."""
        parameters, _ = self._case()
        mean = self.likelihood.quantile_mean(parameters)
        if mean is None:
            return
        for share in (0.1, 0.5, 0.9):
            each = torch.stack(
                [Predictive(self.likelihood, p.unsqueeze(0)).quantile(share) for p in parameters]
            )
            found = Predictive(self.likelihood, mean.unsqueeze(0)).quantile(share)
            scale = each.std(0).clamp_min(1.0)
            assert float(((found - each.mean(0)) / scale).abs().max()) < 1e-3

    def test_the_support_covers_all_temperatures(self) -> None:
        """Twice as wide a grid gives the same sums."""
        parameters, _ = self._case()
        low, high = min(TEMPERATURES), max(TEMPERATURES)
        own = grid_of(self.likelihood, parameters, (low, high))
        wider = grid_of(self.likelihood, parameters, (low, 4 * high))
        for temperature in TEMPERATURES:
            sums = []
            for grid in (own, wider):
                lp = self.likelihood.log_prob(parameters.unsqueeze(-2), grid.points)
                sums.append(grid.log_integral(log_power_mean(lp, 0.5) / temperature))
            assert float((sums[0] - sums[1]).abs().max()) < self.tolerance

    def test_distribution_functions_rise_to_one(self) -> None:
        """The quantiles of a member are inverse to its distribution function."""
        parameters, _ = self._case()
        grid = grid_of(self.likelihood, parameters, (1.0, 1.0))
        lp = self.likelihood.log_prob(parameters.unsqueeze(-2), grid.points)
        found = GridDistribution(grid, log_power_mean(lp, 0.5))
        assert float(found.below.diff(dim=-1).min()) > -self.tolerance
        assert float((found.below[..., -1] - 1).abs().max()) < self.tolerance
        shares = torch.full((1, len(found.mean)), 0.3, dtype=torch.float64)
        reached = found.cdf(found.quantile(shares))
        assert float((shares - reached).max()) < 1e-4
