"""Distributions of a number from their values on a grid: moments, distribution functions, CRPS.

Legend: R rows (targets), V points of a grid, Q any dimensions; F a distribution function.

    F(y_v)     integrals from the first point to each, cubic Hermite polynomials in between
    CRPS       ∫ (F(z) − [z ≥ y])² dz = 2 ∫_{z<y} F + E[Y] − y − ∫ F (1 − F)
"""

from __future__ import annotations

import functools
import math
from typing import Protocol

import torch
from torch import Tensor


class NumberGrid(Protocol):
    """Points for each row, and the rules that integrate between them."""

    @property
    def discrete(self) -> bool:
        """Whether the points are the only possible values."""

    @property
    def points(self) -> Tensor:
        """[R, V], ascending."""

    def log_integral(self, log_f: Tensor) -> Tensor:
        """[..., R] the logarithm of the integral (or sum) of exp(log_f [..., R, V])."""

    def integral_error(self, log_f: Tensor) -> Tensor:
        """[..., R] how far `log_integral` changes with a coarser rule on the same points."""

    def integral(self, values: Tensor) -> Tensor:
        """[..., R] the integral (or sum) of values [..., R, V]."""

    def cumulative(self, values: Tensor, after: float) -> Tensor:
        """[R, V] integrals from the first point, of values that are 0 before and `after` after."""

    def locate(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the cell of each y [..., R], and the position in it from 0 to 1."""

    def place(self, cell: Tensor, position: Tensor) -> Tensor:
        """The inverse of `locate`."""

    def width(self, cell: Tensor) -> Tensor:
        """[..., R] the widths of cells."""


class GridDistribution:
    """A distribution for each row, from its values on a grid.

    Args:
        grid: The grid.
        log_f: [R, V] log-density, or log-probabilities, up to a constant per row.

    Example:
        >>> from afterdrop.family.uniform_grid import UniformGrid
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> grid = UniformGrid.over(-8 * one, 8 * one, one / 5, discrete=False)
        >>> normal = GridDistribution(grid, -grid.points.square() / 2)
        >>> round(normal.cdf(one).item(), 5), round(normal.quantile(0.975 * one).item(), 3)
        (0.84134, 1.96)
    """

    def __init__(self, grid: NumberGrid, log_f: Tensor) -> None:
        self.grid = grid
        log_f = log_f - grid.log_integral(log_f).unsqueeze(-1)
        self.f = log_f.exp()
        self.entropy = -grid.integral(self.f * log_f.clamp_min(-1e30))
        self.mean = grid.integral(self.f * grid.points)
        centred = grid.points - self.mean.unsqueeze(-1)
        self.variance = grid.integral(self.f * centred.square())

    @functools.cached_property
    def below(self) -> Tensor:
        """[R, V] the distribution function at the points."""
        if self.grid.discrete:
            return self.f.cumsum(-1).clamp_max_(1.0)
        found = self.grid.cumulative(self.f, 0.0)
        return (found / found[..., -1:]).clamp_(0.0, 1.0)

    @functools.cached_property
    def _area(self) -> Tensor:
        """[R, V] ∫ F up to the points."""
        return self.grid.cumulative(self.below, 1.0)

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        return self.grid.points[..., 0], self.grid.points[..., -1]

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y ≤ y) for y [..., R]; NaN where y is."""
        low, high = self._ends
        known = y.where(~y.isnan(), low)
        if self.grid.discrete:
            cell = (known - low).floor().clamp(0, self.below.shape[-1] - 1).long()
            found = take(self.below, cell).masked_fill(y < low, 0.0)
        else:
            found = self._between(self.below, self.f, *self.grid.locate(known)).clamp(0.0, 1.0)
            found = found.masked_fill(y <= low, 0.0).masked_fill(y >= high, 1.0)
        return found.masked_fill(y.isnan(), torch.nan)

    def centred_cdf(self, y: Tensor) -> Tensor:
        """P(Y < y) + P(Y = y)/2, which is uniform on average where the distribution is right."""
        found = self.cdf(y)
        return (found + self.cdf(y - 1)) / 2 if self.grid.discrete else found

    def crps(self, y: Tensor) -> Tensor:
        """[R] the continuous ranked probability score of y [R]."""
        low, high = self._ends
        if self.grid.discrete:
            above = (self.grid.points >= y.unsqueeze(-1)).double()
            outside = (low - y).clamp_min(0.0) + (y - 1 - high).clamp_min(0.0)
            return (self.below - above).square().sum(-1) + outside
        area = self._between(self._area, self.below, *self.grid.locate(y))
        area = area.masked_fill(y <= low, 0.0)
        area = torch.where(y >= high, y - self.mean, area)
        spread = self.grid.integral(self.below * (1 - self.below))
        return 2 * area + self.mean - y - spread

    def quantile(self, share: Tensor) -> Tensor:
        """The numbers below which Y lies with probability `share` [..., R]."""
        shares = share.reshape(math.prod(share.shape[:-1]), share.shape[-1]).double()  # [Q, R]
        last = self.below.shape[-1] - 1
        cell = torch.searchsorted(self.below.contiguous(), shares.t().contiguous()).t()
        if self.grid.discrete:
            found = self.grid.points[..., 0] + cell.clamp_max(last)
        else:
            cell = (cell - 1).clamp(0, last - 1)
            found = self.grid.place(cell, self._invert(cell, shares))
        return found.reshape(share.shape)

    def _between(self, values: Tensor, slopes: Tensor, cell: Tensor, r: Tensor) -> Tensor:
        """The cubic polynomial through the values and slopes at both ends of a cell."""
        return _cubic(*self._cell_ends(values, slopes, cell), r)

    def _cell_ends(
        self, values: Tensor, slopes: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values at both ends of cells, and slopes there times the width."""
        width, after = self.grid.width(cell), cell + 1
        rise, end_rise = take(slopes, cell) * width, take(slopes, after) * width
        return take(values, cell), take(values, after), rise, end_rise

    def _invert(self, cell: Tensor, share: Tensor) -> Tensor:
        """The position from 0 to 1 in each cell [Q, R] where F reaches a share, by bisection."""
        low, high = torch.zeros_like(share), torch.ones_like(share)
        ends = self._cell_ends(self.below, self.f, cell)
        for _ in range(40):
            middle = (low + high) / 2
            under = _cubic(*ends, middle) < share
            low, high = torch.where(under, middle, low), torch.where(under, high, middle)
        return (low + high) / 2


def take(table: Tensor, cell: Tensor) -> Tensor:
    """Entries [..., R] of a table [R, V].

    Example:
        >>> take(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 0]))
        tensor([2, 3])
    """
    rows = torch.arange(len(table), device=table.device).expand(cell.shape)
    return table[rows, cell]


def _cubic(first: Tensor, last: Tensor, rise: Tensor, end_rise: Tensor, r: Tensor) -> Tensor:
    step = last - first
    return first + r * (
        rise + r * (3 * step - 2 * rise - end_rise + r * (rise + end_rise - 2 * step))
    )
