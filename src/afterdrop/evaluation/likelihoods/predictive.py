"""The distribution of a number that a predictor returns.

Legend: K samples, R rows (all targets of the input), V points of a grid, P parameters; Q any
further dimensions of an argument.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from afterdrop.errors import MemberError
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.family.member import Member
from afterdrop.family.power_mean import log_power_mean
from afterdrop.family.uniform_grid import GridDistribution, UniformGrid

Average = Literal["power", "quantile"]


class Predictive:
    """The distribution of each target.

    Numbers are float64. `mean` and `variance` have the shape of the targets; arguments of the
    methods may have further dimensions before it.

    Args:
        kind: The likelihood.
        parameters: [K, ..., P] of the samples, at the temperature of the samples.
        alpha: Power of their mean.
        temperature: Of the mean.

    Attributes:
        shape: The shape of the targets.

    Example:
        >>> from afterdrop.evaluation.likelihoods.parametric import Gaussian
        >>> samples = torch.tensor([[[-1.0, 1.0]], [[1.0, 1.0]]])  # N(−1, 1) and N(1, 1)
        >>> mixture = Predictive(Gaussian(), samples, alpha=1.0)
        >>> round(mixture.variance.item(), 6), round(mixture.cdf(torch.zeros(1)).item(), 6)
        (2.0, 0.5)
    """

    def __init__(
        self,
        kind: ParametricLikelihood,
        parameters: Tensor,
        alpha: float = 0.0,
        temperature: float = 1.0,
        power: float = 1.0,
    ) -> None:
        self.kind, self.alpha, self.temperature, self._power = kind, alpha, temperature, power
        self.shape = parameters.shape[1:-1]
        self._parameters = parameters.double().flatten(1, -2) if self.shape else parameters.double()

    @classmethod
    def of(
        cls, kind: ParametricLikelihood, samples: Tensor, member: Member, average: Average
    ) -> Predictive:
        """That of a member, from parameters [K, ..., P] of its samples.

        Args:
            kind: The likelihood.
            samples: The parameters.
            member: How to predict.
            average: "power" for the member's power mean, "quantile" for the distribution whose
                quantiles are the means of the samples' quantiles.

        Raises:
            MemberError: If the likelihood has no mean of quantiles.
        """
        if average == "quantile":
            mean = kind.quantile_mean(samples)
            if mean is None:
                raise MemberError(
                    f"average='quantile' is not defined for {kind.name}; use average='power'"
                )
            samples, member = mean.unsqueeze(0), Member(0.0, 0.0, member.temperature)
        each = kind.noise or member.temper == "sample" or len(samples) == 1
        tempered = kind.tempered(samples, member.temperature) if each else None
        if tempered is not None:
            return cls(kind, tempered, member.alpha)
        if each:
            return cls(kind, samples, member.alpha, power=1 / member.temperature)
        return cls(kind, samples, member.alpha, member.temperature)

    @functools.cached_property
    def _grid(self) -> UniformGrid:
        each = 1 / self._power if self._power != 1 else self.temperature
        ends = min(1.0, each), max(1.0, each)
        support = self.kind.support(self._parameters, ends)
        return UniformGrid.over(*support, discrete=self.kind.discrete)

    @functools.cached_property
    def _lift(self) -> Tensor:
        """[K, R] what normalises samples that were tempered without a closed form."""
        if self._power == 1:
            return torch.zeros_like(self._parameters[..., 0])
        points = self._grid.points
        return torch.stack(
            [
                -self._grid.log_integral(self._power * self.kind.log_prob(p.unsqueeze(-2), points))
                for p in self._parameters
            ]
        )

    def _log_mean(self, y: Tensor) -> Tensor:
        """Log M at y [Q, R], before the temperature of the mean."""
        lp = [
            self._power * self.kind.log_prob(p, y) + lift
            for p, lift in zip(self._parameters, self._lift)
        ]
        return log_power_mean(torch.stack(lp), self.alpha)

    @functools.cached_property
    def _distribution(self) -> tuple[GridDistribution, Tensor]:
        log_f = self._log_mean(self._grid.points.t()).t() / self.temperature
        return GridDistribution(self._grid, log_f), self._grid.log_integral(log_f)

    def _rows(self, value: Tensor | float) -> Tensor:
        """An argument as [Q, R]."""
        device = self._parameters.device
        given = torch.as_tensor(value, dtype=torch.float64, device=device)
        if given.dim() < len(self.shape):
            given = given.expand(self.shape)
        whole = torch.broadcast_shapes(given.shape, self.shape)
        front = whole[: len(whole) - len(self.shape)]
        return given.expand(whole).reshape(*front, -1)

    def _shaped(self, found: Tensor) -> Tensor:
        return found.reshape(*found.shape[:-1], *self.shape)

    @property
    def mean(self) -> Tensor:
        """The expected values."""
        return self._shaped(self._distribution[0].mean)

    @property
    def variance(self) -> Tensor:
        """The variances."""
        return self._shaped(self._distribution[0].variance)

    def log_prob(self, y: Tensor | float) -> Tensor:
        """Log-densities, or log-probabilities of counts; exact but for the normaliser."""
        log_z = self._distribution[1]
        return self._shaped(self._log_mean(self._rows(y)) / self.temperature - log_z)

    def cdf(self, y: Tensor | float) -> Tensor:
        """The probability of at most y."""
        return self._shaped(self._distribution[0].cdf(self._rows(y)))

    def quantile(self, share: Tensor | float) -> Tensor:
        """The number below which the target lies with a probability of `share`."""
        rows = self._rows(share)
        if bool(((rows < 0) | (rows > 1)).any()):
            raise MemberError("quantile needs probabilities from 0 to 1")
        return self._shaped(self._distribution[0].quantile(rows))

    def sample(
        self, shape: tuple[int, ...] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws [*shape, *targets], by the quantiles of uniform numbers."""
        drawn = torch.rand((*shape, *self.shape), dtype=torch.float64, generator=generator)
        return self.quantile(drawn.to(self._parameters.device))
