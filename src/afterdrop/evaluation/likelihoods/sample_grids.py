"""The grid over which samples of a number are summed, and how wrong its sums are.

Legend: K samples, R rows (targets), V points of a grid, P parameters.

The mean of the samples' densities integrates to 1 exactly: by how much a grid misses that shows
whether it misses peaks, which no rule on the same points can see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.family.cell_grid import CellGrid
from afterdrop.family.grid_distribution import NumberGrid
from afterdrop.family.uniform_grid import UniformGrid, fits

WORST = 0.01  # nats: sums that are further off are refused


def grid_of(
    kind: ParametricLikelihood, parameters: Tensor, ends: tuple[float, float]
) -> NumberGrid:
    """A grid that covers samples [K, R, P] at temperatures between `ends`."""
    low, high, step = kind.support(parameters, ends)
    if kind.discrete or bool(fits(low, high, step).all()):
        return UniformGrid.over(low, high, step, discrete=kind.discrete)
    every = parameters
    mean = kind.geometric(parameters)
    if mean is not None:  # what small alphas come close to may lie between all samples
        every = torch.cat([parameters, mean.unsqueeze(0)])
    # Cells widen outside of these intervals, as tails do at temperatures above 1.
    own = kind.support(every.unsqueeze(0), (min(1.0, ends[0]), 1.0))
    return CellGrid.around(low, high, *own)


def is_narrow(kind: ParametricLikelihood, parameters: Tensor, ends: tuple[float, float]) -> Tensor:
    """[R] which rows have samples [K, R, P] that are too narrow for a uniform grid."""
    if kind.discrete:
        return torch.zeros(parameters.shape[1], dtype=torch.bool, device=parameters.device)
    return ~fits(*kind.support(parameters, ends))


def stated_error(grid: NumberGrid, log_means: Tensor, plain: Tensor | None) -> Tensor:
    """[R] by how much a logarithm of a sum over the grid may be off.

    Args:
        grid: The grid.
        log_means: [R, V] the member's log power means.
        plain: [R, V] the log arithmetic means, of which the integral is 1, if they are known.
    """
    error = grid.integral_error(log_means)
    return error if plain is None else error.maximum(grid.log_integral(plain).abs())


def require_precise(kind: ParametricLikelihood, error: Tensor) -> None:
    """Refuses sums over a grid that are wrong.

    Args:
        kind: The likelihood.
        error: [...] what `stated_error` says.

    Raises:
        DataError: If an error is larger than `WORST`.
    """
    worst = error.max().item() if error.numel() else 0.0
    if not worst <= WORST:
        raise DataError(
            f"integrals of {kind.name} densities are off by {worst:.2g} nats, more than {WORST:g}: "
            "some samples are too narrow beside the distances between them, or the likelihood's "
            "support does not cover them; give variances a lower limit, as softplus(v) + 1e-4 "
            "for standardised targets, or correct `support`"
        )
