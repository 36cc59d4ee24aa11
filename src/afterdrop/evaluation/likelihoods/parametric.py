"""Likelihoods of numbers: the interface for a user's own, and the two that are built in.

A model gives the parameters of a distribution, such as a mean and a variance, for each target. Of
this distribution the family needs two things: the log-density of a number, and an interval and step
for sums over all numbers. The rest follows from them (`density_sums`, `predictive`). Closed forms
are optional.

Legend: K samples, P parameters; y a target.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.family.uniform_grid import normal_log_prob
from afterdrop.masks.model_call import output_tensor

_TAIL = 7.0  # standard deviations: what lies beyond has a probability of 3e-12
_STEP = 0.2  # of the smallest standard deviation, for distribution functions within 1e-5


class ParametricLikelihood(abc.ABC):
    """The distribution of a number, given the parameters that a model returns.

    `afterdrop.conformance.likelihood_check.LikelihoodConformance` has the tests for a subclass.

    Attributes:
        name: How requests and files call it.
        discrete: Whether targets are integers.
        noise: Whether the temperature stands for a noise variance, which the model does not give.
    """

    name: ClassVar[str]
    discrete: ClassVar[bool] = False
    noise: ClassVar[bool] = False

    def parameters(self, output: Any) -> Tensor:
        """Parameters [B, ..., P] from what a model returned; by default its tensor, with P = 1."""
        return output_tensor(output).unsqueeze(-1)

    @abc.abstractmethod
    def log_prob(self, parameters: Tensor, y: Tensor) -> Tensor:
        """Log-densities (or log-probabilities) of y [...] under parameters [..., P]."""

    @abc.abstractmethod
    def support(
        self, parameters: Tensor, temperatures: tuple[float, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Where sums over all numbers run: low, high and step, each [...].

        Args:
            parameters: [K, ..., P] of all samples, whose tails the interval must contain.
            temperatures: The lowest and the highest that the distributions will be raised to: T
                above 1 widens tails, T below 1 needs smaller steps. Steps of counts are 1.
        """

    def why_invalid(self, parameters: Tensor) -> str | None:
        """Why parameters [..., P] are those of no distribution; None if they are fine."""
        return None

    def why_invalid_targets(self, y: Tensor) -> str | None:
        """Why targets [N] are impossible, as "negative counts"; None if they are fine."""
        return None

    def geometric(self, parameters: Tensor) -> Tensor | None:
        """Parameters [..., P] of the geometric mean of samples [K, ..., P], if it has any."""
        return None

    def quantile_mean(self, parameters: Tensor) -> Tensor | None:
        """Parameters [..., P] of the distribution whose quantiles are the means of the samples'."""
        return None

    def tempered(self, parameters: Tensor, temperature: float) -> Tensor | None:
        """Parameters of the distribution to the power 1/T, normalised, if it has any."""
        return None

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor] | None:
        """Means and variances [...] of distributions [..., P], if they have a closed form."""
        return None

    def start(self, parameters: Tensor, y: Tensor) -> float:
        """A temperature near the best one, from deterministic parameters [N, P] and targets [N]."""
        return 1.0


class Gaussian(ParametricLikelihood):
    """A normal distribution; the model returns (mean, variance), as `nn.GaussianNLLLoss` takes."""

    name = "gaussian"

    def parameters(self, output: Any) -> Tensor:
        """Means and variances [B, ..., 2]."""
        pair = output if isinstance(output, Sequence) else ()
        if len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise DataError(
                f"likelihood='gaussian' needs a model that returns (mean, variance), not "
                f"{type(output).__name__}; for another output give logits=function, which returns "
                "this pair, or likelihood='squared_error' if there is no variance"
            )
        mean, variance = pair
        return torch.stack([mean, variance.expand_as(mean)], -1)

    def log_prob(self, parameters: Tensor, y: Tensor) -> Tensor:
        """Log N(y; mean, variance)."""
        mean, variance = parameters.unbind(-1)
        return normal_log_prob(y, mean, variance)

    def support(
        self, parameters: Tensor, temperatures: tuple[float, float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Seven standard deviations around all means."""
        mean, variance = parameters.unbind(-1)
        low, high = temperatures
        scale = variance.sqrt()
        tail = _TAIL * max(1.0, high) ** 0.5 * scale
        step = scale.amin(0) * min(_STEP, 0.5 * low**0.5)
        return (mean - tail).amin(0), (mean + tail).amax(0), step

    def why_invalid(self, parameters: Tensor) -> str | None:
        """Variances must be positive."""
        variance = parameters[..., 1]
        if bool((variance > 0).all()):
            return None
        return (
            f"a variance of {variance.min().item():g}; give variances above 0 (not log-variances): "
            "nn.Softplus or exp, plus a small constant"
        )

    def geometric(self, parameters: Tensor) -> Tensor:
        """Precision mean_k 1/σ_k², and the mean weighted by precisions."""
        mean, variance = parameters.unbind(-1)
        precision = (1 / variance).mean(0)
        return torch.stack([(mean / variance).mean(0) / precision, 1 / precision], -1)

    def quantile_mean(self, parameters: Tensor) -> Tensor:
        """Mean of the means, and mean of the standard deviations."""
        mean, variance = parameters.unbind(-1)
        return torch.stack([mean.mean(0), variance.sqrt().mean(0).square()], -1)

    def tempered(self, parameters: Tensor, temperature: float) -> Tensor:
        """T multiplies the variance."""
        mean, variance = parameters.unbind(-1)
        return torch.stack([mean, variance * temperature], -1)

    def moments(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The parameters themselves."""
        mean, variance = parameters.unbind(-1)
        return mean, variance

    def start(self, parameters: Tensor, y: Tensor) -> float:
        """The mean of squared errors in units of the variance: the best temperature itself."""
        mean, variance = parameters.double().unbind(-1)
        return ((y - mean).square() / variance).mean().item() if len(y) else 1.0


class SquaredError(Gaussian):
    """A normal distribution whose variance is fitted; the model returns means.

    The temperature takes the place of the noise variance: samples have variance 1 times T.
    """

    name = "squared_error"
    noise = True

    def parameters(self, output: Any) -> Tensor:
        """Means and variances of 1 [B, ..., 2]."""
        mean = output_tensor(output)
        return torch.stack([mean, torch.ones_like(mean)], -1)
