"""Distributions of a number on uniform grids: integrals, moments, distribution functions, CRPS.

Legend: R rows (targets), V points of a grid; h is the step of a grid, F a distribution function.

    ∫ f        h Σ_v f(y_v)      the trapezoidal rule, whose error falls faster than any power of h
                                 for smooth densities whose tails the grid covers
    F(y_v)     cumulative sums of a rule of order 6, cubic Hermite polynomials in between
    CRPS       ∫ (F(z) − [z ≥ y])² dz = 2 ∫_{z<y} F + E[Y] − y − ∫ F (1 − F)

For counts the points are integers, h = 1, and every sum is exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from afterdrop.errors import DataError

LIMIT = 4097  # points of a grid for a density; a wider one has larger steps
MOST = 2**16  # values of a count
_RULE = (11.0, -93.0, 802.0, 802.0, -93.0, 11.0)  # ∫ over the middle cell, times 1440/h


@dataclasses.dataclass(frozen=True)
class UniformGrid:
    """Points low + h·v for each row.

    Attributes:
        low: [R] the first points.
        step: [R] the steps h.
        count: V.
        discrete: Whether the points are the only possible values.
    """

    low: Tensor
    step: Tensor
    count: int
    discrete: bool = False

    @classmethod
    def over(cls, low: Tensor, high: Tensor, step: Tensor, *, discrete: bool) -> UniformGrid:
        """A grid from low to high with steps of at most `step`, up to `LIMIT` points.

        Example:
            >>> one = torch.ones(1, dtype=torch.float64)
            >>> UniformGrid.over(-one, one, one / 2, discrete=False).points
            tensor([[-1.0000, -0.5000,  0.0000,  0.5000,  1.0000]], dtype=torch.float64)
        """
        low, high, step = (t.double() for t in (low, high, step))
        cells = int(((high - low) / step).max().ceil().item()) if low.numel() else 1
        if discrete:
            if cells >= MOST:
                raise DataError(
                    f"the likelihood's support has {cells + 1} values; sums over at most {MOST} "
                    "are possible: use a likelihood of numbers, such as 'gaussian'"
                )
            return cls(low.round(), torch.ones_like(low), cells + 1, True)
        cells = min(max(2, cells + cells % 2), LIMIT - 1)  # even: every second point is a grid, too
        return cls(low, (high - low) / cells, cells + 1)

    @functools.cached_property
    def points(self) -> Tensor:
        """[R, V]."""
        steps = torch.arange(self.count, dtype=torch.float64, device=self.low.device)
        return self.low.unsqueeze(-1) + self.step.unsqueeze(-1) * steps

    def log_integral(self, log_f: Tensor, every: int = 1) -> Tensor:
        """[..., R] the logarithm of the integral (or sum) of exp(log_f [..., R, V])."""
        return log_f[..., ::every].logsumexp(-1) + (every * self.step).log()

    def integral_error(self, log_f: Tensor) -> Tensor:
        """[..., R] how far `log_integral` changes if every second point is left out.

        The error of the rule with all points is far smaller. Sums over counts have no such error.
        """
        if self.discrete:
            return torch.zeros_like(log_f[..., 0])
        return (self.log_integral(log_f) - self.log_integral(log_f, every=2)).abs()


class GridDistribution:
    """A distribution for each row, from its values on a grid.

    Args:
        grid: The grid.
        log_f: [R, V] log-density, or log-probabilities, up to a constant per row.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> grid = UniformGrid.over(-8 * one, 8 * one, one / 5, discrete=False)
        >>> normal = GridDistribution(grid, -grid.points.square() / 2)
        >>> round(normal.cdf(one).item(), 5), round(normal.quantile(0.975 * one).item(), 3)
        (0.84134, 1.96)
    """

    def __init__(self, grid: UniformGrid, log_f: Tensor) -> None:
        self.grid = grid
        log_f = log_f - grid.log_integral(log_f).unsqueeze(-1)
        self.f = log_f.exp()
        self._h = grid.step.unsqueeze(-1)
        self.entropy = -(self.f * log_f.clamp_min(-1e30)).sum(-1) * grid.step
        self.mean = (self.f * grid.points).sum(-1) * grid.step
        centred = grid.points - self.mean.unsqueeze(-1)
        self.variance = (self.f * centred.square()).sum(-1) * grid.step

    @functools.cached_property
    def below(self) -> Tensor:
        """[R, V] the distribution function at the points."""
        if self.grid.discrete:
            return self.f.cumsum(-1).clamp_max_(1.0)
        found = self._cumulative(self.f, 0.0)
        return (found / found[..., -1:]).clamp_(0.0, 1.0)

    @functools.cached_property
    def _area(self) -> Tensor:
        """[R, V] ∫ F up to the points."""
        return self._cumulative(self.below, 1.0)

    def _cumulative(self, values: Tensor, after: float) -> Tensor:
        """Integrals from the first point to each, of values that are 0 before and `after` after."""
        ends = (values.new_zeros(*values.shape[:-1], 2), values.new_full((len(values), 2), after))
        padded = torch.cat([ends[0], values, ends[1]], -1)
        count = values.shape[-1] - 1
        cells = sum(w * padded[..., i : i + count] for i, w in enumerate(_RULE))
        sums = (cells * (self._h / 1440)).cumsum(-1)
        return torch.cat([torch.zeros_like(sums[..., :1]), sums], -1)

    def _cell(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the cell of each y [..., R], and the position in it from 0 to 1."""
        place = ((y - self.grid.low) / self.grid.step).clamp(0, self.grid.count - 1)
        cell = place.floor().clamp_max(self.grid.count - 2)
        return cell.long(), place - cell

    def cdf(self, y: Tensor) -> Tensor:
        """P(Y ≤ y) for y [..., R]."""
        low, high = self.grid.low, self.grid.points[..., -1]
        if self.grid.discrete:
            cell = (y - low).floor().clamp(0, self.grid.count - 1).long()
            return _take(self.below, cell).masked_fill(y < low, 0.0)
        cell, r = self._cell(y)
        found = _hermite(self.below, self.f * self._h, cell, r).clamp(0.0, 1.0)
        return found.masked_fill(y <= low, 0.0).masked_fill(y >= high, 1.0)

    def centred_cdf(self, y: Tensor) -> Tensor:
        """P(Y < y) + P(Y = y)/2, which is uniform on average where the distribution is right."""
        found = self.cdf(y)
        return (found + self.cdf(y - 1)) / 2 if self.grid.discrete else found

    def crps(self, y: Tensor) -> Tensor:
        """[R] the continuous ranked probability score of y [R]."""
        low, high = self.grid.low, self.grid.points[..., -1]
        if self.grid.discrete:
            above = (self.grid.points >= y.unsqueeze(-1)).double()
            outside = (low - y).clamp_min(0.0) + (y - 1 - high).clamp_min(0.0)
            return (self.below - above).square().sum(-1) + outside
        cell, r = self._cell(y)
        area = _hermite(self._area, self.below * self._h, cell, r)
        area = area.masked_fill(y <= low, 0.0)
        area = torch.where(y >= high, y - self.mean, area)
        spread = (self.below * (1 - self.below)).sum(-1) * self.grid.step
        return 2 * area + self.mean - y - spread

    def quantile(self, share: Tensor) -> Tensor:
        """The numbers below which Y lies with probability `share` [..., R]."""
        rows = share.movedim(-1, 0).reshape(share.shape[-1], -1).contiguous()  # [R, ...]
        cell = torch.searchsorted(self.below.contiguous(), rows.double())
        if self.grid.discrete:
            cell = cell.clamp_max(self.grid.count - 1)
            found = self.grid.low.unsqueeze(-1) + cell
        else:
            cell = (cell - 1).clamp(0, self.grid.count - 2)
            found = self.grid.low.unsqueeze(-1) + self._h * (cell + self._invert(cell, rows))
        return found.reshape(-1, *share.shape[:-1]).movedim(0, -1)

    def _invert(self, cell: Tensor, share: Tensor) -> Tensor:
        """The position from 0 to 1 in each cell [R, Q] where F reaches a share, by bisection."""
        ends = cell.t(), (cell + 1).t()
        low, high = torch.zeros_like(share), torch.ones_like(share)
        first, last = (_take(self.below, end).t() for end in ends)
        rise, end_rise = (_take(self.f * self._h, end).t() for end in ends)
        for _ in range(40):
            middle = (low + high) / 2
            under = _cubic(first, last, rise, end_rise, middle) < share
            low, high = torch.where(under, middle, low), torch.where(under, high, middle)
        return (low + high) / 2


def _take(table: Tensor, cell: Tensor) -> Tensor:
    """Entries [..., R] of a table [R, V]."""
    rows = torch.arange(len(table), device=table.device).expand(cell.shape)
    return table[rows, cell]


def _hermite(values: Tensor, slopes: Tensor, cell: Tensor, r: Tensor) -> Tensor:
    """The cubic polynomial through the values and slopes at both ends of a cell."""
    first, last = (_take(values, c) for c in (cell, cell + 1))
    rise, end_rise = (_take(slopes, c) for c in (cell, cell + 1))
    return _cubic(first, last, rise, end_rise, r)


def _cubic(first: Tensor, last: Tensor, rise: Tensor, end_rise: Tensor, r: Tensor) -> Tensor:
    step = last - first
    return first + r * (
        rise + r * (3 * step - 2 * rise - end_rise + r * (rise + end_rise - 2 * step))
    )


def normal_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log N(y; mean, variance).

    Example:
        >>> normal_log_prob(*torch.tensor([0.0, 0.0, 1.0]))
        tensor(-0.9189)
    """
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))
