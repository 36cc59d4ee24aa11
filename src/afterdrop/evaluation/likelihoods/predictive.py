"""The distribution of a number that a predictor returns.

Legend: K samples, R rows (all targets of the input), V points of a grid, P parameters; Q any
further dimensions of an argument.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from afterdrop.errors import MemberError
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.sample_grids import grid_of, require_precise, stated_error
from afterdrop.evaluation.request import CLASS_LIKELIHOODS
from afterdrop.family.grid_distribution import GridDistribution, NumberGrid
from afterdrop.family.member import Member
from afterdrop.family.power_mean import PowerSums, log_power_mean

Average = Literal["power", "quantile"]


class Predictive:
    """The distribution of each target.

    Numbers are float64. `mean` and `variance` have the shape of the targets; arguments of the
    methods may have further dimensions before it, and may lack a last dimension of 1.

    Args:
        kind: The likelihood.
        parameters: [K, ..., P] of the samples, at the temperature of the samples.
        alpha: Power of their mean.
        temperature: Of the mean.
        power: 1/T of each sample, where tempered samples have no parameters.

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
        if alpha == 0 or len(parameters) == 1:
            self._use_closed_form()

    def _use_closed_form(self) -> None:
        """Replaces the samples by their geometric mean, where that has parameters."""
        temperature = self.temperature / self._power
        mean = self._parameters[0]
        if len(self._parameters) > 1:
            found = self.kind.geometric(self._parameters)
            if found is None:
                return
            mean = found
        tempered = mean if temperature == 1 else self.kind.tempered(mean, temperature)
        self.temperature, self._power = (temperature, 1.0) if tempered is None else (1.0, 1.0)
        self._parameters = (mean if tempered is None else tempered).unsqueeze(0)

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
        parameters, power, temperature = tempered_samples(kind, samples, member)
        return cls(kind, parameters, member.alpha, temperature, power)

    @functools.cached_property
    def _grid(self) -> NumberGrid:
        each = 1 / self._power if self._power != 1 else self.temperature
        return grid_of(self.kind, self._parameters, (min(1.0, each), max(1.0, each)))

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

    def _samples(self, y: Tensor) -> Iterator[Tensor]:
        """Log-densities of each sample at y."""
        for parameters, lift in zip(self._parameters, self._lift):
            yield self._power * self.kind.log_prob(parameters, y) + lift

    @functools.cached_property
    def _on_grid(self) -> Tensor:
        """[R, V] log-densities up to a constant."""
        sums = PowerSums(tuple({self.alpha, 1.0}))
        for lp in self._samples(self._grid.points.t()):
            sums.add(lp.t().unsqueeze(0))
        log_means = sums.log_mean(self.alpha)
        error = stated_error(self._grid, log_means, sums.log_mean(1.0))
        require_precise(self.kind, error)
        return log_means / self.temperature

    @functools.cached_property
    def _distribution(self) -> GridDistribution:
        return GridDistribution(self._grid, self._on_grid)

    @functools.cached_property
    def _log_z(self) -> Tensor:
        """[R] the logarithms of the integrals: 0 of the arithmetic mean, and of one sample."""
        if self.temperature == 1 and (self.alpha == 1 or len(self._parameters) == 1):
            return torch.zeros_like(self._parameters[0, ..., 0])
        return self._grid.log_integral(self._on_grid)

    def _rows(self, value: Tensor | float) -> Tensor:
        """An argument as [Q, R]."""
        device = self._parameters.device
        given = torch.as_tensor(value, dtype=torch.float64, device=device)
        if 0 < given.dim() == len(self.shape) - 1 and (*given.shape, 1) == tuple(self.shape):
            given = given.unsqueeze(-1)  # [B] targets of a model that returns [B, 1]
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
        return self._shaped(self._distribution.mean)

    @property
    def variance(self) -> Tensor:
        """The variances."""
        return self._shaped(self._distribution.variance)

    def log_prob(self, y: Tensor | float) -> Tensor:
        """Log-densities, or log-probabilities of counts; exact but for the normaliser."""
        lp = torch.stack(list(self._samples(self._rows(y))))
        return self._shaped(log_power_mean(lp, self.alpha) / self.temperature - self._log_z)

    def cdf(self, y: Tensor | float) -> Tensor:
        """The probability of at most y; NaN where y is NaN."""
        return self._shaped(self._distribution.cdf(self._rows(y)))

    def quantile(self, share: Tensor | float) -> Tensor:
        """The number below which the target lies with a probability of `share`."""
        rows = self._rows(share)
        outside = rows[~((rows >= 0) & (rows <= 1))]
        if len(outside):
            raise MemberError(
                f"share={outside[0].item():g}: a quantile needs probabilities from 0 to 1"
            )
        return self._shaped(self._distribution.quantile(rows))

    def sample(
        self, shape: tuple[int, ...] = (), generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws [*shape, *targets], by the quantiles of uniform numbers."""
        drawn = torch.rand((*shape, *self.shape), dtype=torch.float64, generator=generator)
        return self.quantile(drawn.to(self._parameters.device))


def check_average(average: str, likelihood: str) -> None:
    """Refuses a kind of average that does not exist, or not for the kind of targets.

    Raises:
        MemberError: If `average` is unknown, or "quantile" for classes.
    """
    if average not in get_args(Average):
        raise MemberError(f"average={average!r} must be 'power' or 'quantile'")
    if average == "quantile" and likelihood in CLASS_LIKELIHOODS:
        raise MemberError(
            f"average='quantile' is for predicted numbers, and likelihood={likelihood!r} predicts "
            "classes; use average='power'"
        )


def tempered_samples(
    kind: ParametricLikelihood, samples: Tensor, member: Member
) -> tuple[Tensor, float, float]:
    """Samples as a member averages them, from parameters [K, ..., P] as the model gave them.

    Returns:
        Their parameters, the power to which each is still to be raised (where tempered samples have
        no parameters), and the temperature of their mean.

    Example:
        >>> from afterdrop.evaluation.likelihoods.parametric import Gaussian
        >>> member = Member(1, 1, temperature=2.0, temper="sample")
        >>> tempered_samples(Gaussian(), torch.tensor([[0.0, 1.0], [0.0, 3.0]]), member)[0]
        tensor([[0., 2.],
                [0., 6.]])
    """
    if not (kind.noise or member.temper == "sample" or len(samples) == 1):
        return samples, 1.0, member.temperature
    tempered = kind.tempered(samples, member.temperature)
    if tempered is None:
        return samples, 1 / member.temperature, 1.0
    return tempered, 1.0, 1.0
