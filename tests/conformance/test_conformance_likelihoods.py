"""The built-in likelihoods of numbers and the documented one pass the tests for any likelihood."""

import pytest
import torch

from afterdrop.conformance.likelihood_check import LikelihoodConformance
from afterdrop.evaluation.likelihoods.parametric import Gaussian, SquaredError
from oracles.poisson import Poisson


class TestGaussian(LikelihoodConformance):
    likelihood = Gaussian()

    def parameters(self, generator):
        mean, log_variance = torch.randn(2, 6, 5, generator=generator)
        return torch.stack([mean, log_variance.exp()], -1)

    def targets(self, generator):
        return torch.randn(5, generator=generator)


class TestSquaredError(TestGaussian):
    likelihood = SquaredError()


class TestPoisson(LikelihoodConformance):
    likelihood = Poisson()

    def parameters(self, generator):
        return torch.randn(6, 5, 1, generator=generator)

    def targets(self, generator):
        return torch.randint(0, 8, (5,), generator=generator)


class Narrow(Gaussian):
    """Its support misses the tails."""

    name = "narrow"

    def support(self, parameters, temperatures):
        low, high, step = super().support(parameters, temperatures)
        middle = (low + high) / 2
        return middle - 1, middle + 1, step


class WrongMean(Gaussian):
    """Its geometric mean is that of quantiles."""

    name = "wrong mean"

    def geometric(self, parameters):
        return self.quantile_mean(parameters)


class WrongTemper(Gaussian):
    """Its temperature multiplies the standard deviation."""

    name = "wrong temper"

    def tempered(self, parameters, temperature):
        return super().tempered(parameters, temperature**2)


@pytest.mark.parametrize(
    ("likelihood", "test"),
    [
        (Narrow(), "test_each_sample_sums_to_one"),
        (WrongMean(), "test_the_geometric_mean_is_that_of_the_densities"),
        (WrongTemper(), "test_tempered_parameters_are_those_of_the_power"),
    ],
)
def test_faults_are_found(likelihood, test):
    case = TestGaussian()
    case.likelihood = likelihood
    with pytest.raises(AssertionError):
        getattr(case, test)()
