"""What is kept of distributions of numbers at each temperature.

Legend: K samples, J temperatures, R rows (targets), V points of a grid, P parameters.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.sample_grids import grid_of
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores.schema import Results, summarised
from afterdrop.family.grid_distribution import GridDistribution, NumberGrid

_WIDTHS = {"width50_at": (0.25, 0.75), "width90_at": (0.05, 0.95)}
EXACT = (1.0, 1.0)  # lowest and highest temperature where nothing is tempered


@dataclasses.dataclass(frozen=True)
class Temperatures:
    """Where results are kept, and what is tempered there.

    Attributes:
        kept: Of the likelihood.
        samples: Whether each sample is tempered before averaging, or the mean.
        summaries: Whether distributions are summarised at all.
    """

    kept: tuple[float, ...]
    samples: bool
    summaries: bool = True

    @classmethod
    def of(cls, protocol: Protocol) -> Temperatures:
        """Those of an evaluation."""
        return cls(protocol.density_temperatures, protocol.grid.temper == "sample")

    @property
    def each(self) -> list[tuple[float, bool]]:
        """Each, and whether the distribution is summarised there."""
        return [(t, wanted and self.summaries) for t, wanted in summarised(self.kept)]

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest."""
        return min(self.kept), max(self.kept)


def single_results(
    kind: ParametricLikelihood,
    parameters: Tensor,
    y: Tensor,
    applied: list[tuple[float, bool]],
    *,
    summaries: bool = True,
) -> Results:
    """Results of one distribution [R, P]: `nll_at` [J, R] and summaries.

    Args:
        kind: The likelihood.
        parameters: [R, P].
        y: [R].
        applied: Temperatures, and at which of them the distribution is summarised.
        summaries: Whether to summarise it at all.
    """
    nll, kept = [], []
    ends = min(t for t, _ in applied), max(t for t, _ in applied)
    wide: tuple[NumberGrid, Tensor] | None = None
    for temperature, wanted in applied:
        closed = parameters if temperature == 1 else kind.tempered(parameters, temperature)
        if closed is not None:
            nll.append(-kind.log_prob(closed, y))
            grid_and_log_f = on_grid(kind, closed, EXACT) if summaries and wanted else None
        else:
            wide = wide or on_grid(kind, parameters, ends)
            grid_and_log_f = wide[0], wide[1] / temperature
            at_y = kind.log_prob(parameters, y) / temperature
            nll.append(wide[0].log_integral(wide[1] / temperature) - at_y)
        if summaries and wanted:
            assert grid_and_log_f is not None
            kept.append(summary(GridDistribution(*grid_and_log_f), y))
    return {"nll_at": torch.stack(nll), **(stacked(kept) if kept else {})}


def on_grid(
    kind: ParametricLikelihood, parameters: Tensor, ends: tuple[float, float]
) -> tuple[NumberGrid, Tensor]:
    """The grid of one distribution [R, P], and its log-density there."""
    grid = grid_of(kind, parameters.unsqueeze(0), ends)
    return grid, kind.log_prob(parameters.unsqueeze(-2), grid.points)


def summary(found: GridDistribution, y: Tensor) -> Results:
    """What is kept of a distribution at a temperature, each [R]."""
    widths = {}
    for name, ends in _WIDTHS.items():
        shares = torch.tensor(ends, dtype=torch.float64, device=y.device)
        low, high = found.quantile(shares.unsqueeze(-1).expand(2, len(y)))
        widths[name] = high - low
    others = {
        "variance_at": found.variance,
        "entropy_at": found.entropy,
        "crps_at": found.crps(y),
        "cdf_at": found.centred_cdf(y),
        **widths,
    }
    return {"mean_at": found.mean, **{name: tensor.float() for name, tensor in others.items()}}


def stacked(parts: list[Results]) -> Results:
    """Results of several temperatures or alphas, in a new first dimension."""
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
