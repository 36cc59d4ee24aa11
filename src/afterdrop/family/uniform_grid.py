"""Uniform grids of numbers, and the rules that integrate on them.

Legend: R rows (targets), V points of a grid; h is the step of a grid.

    ∫ f        h Σ_v f(y_v)      the trapezoidal rule, whose error falls faster than any power of h
                                 for smooth densities whose tails the grid covers
    ∫_{<y_v}   cumulative sums of a rule of order 6

For counts the points are integers, h = 1, and every sum is exact. Densities of which some samples
are far narrower than the distance between them need `cell_grid`.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
from torch import Tensor

from afterdrop.errors import DataError

LIMIT = 4097  # points of a grid for a density
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
        """A grid from low to high with steps of at most `step`, which `fits` in `LIMIT` points.

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
        cells = max(2, cells + cells % 2)  # even: every second point is a grid, too
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

    def integral(self, values: Tensor) -> Tensor:
        """[..., R] the integral (or sum) of values [..., R, V]."""
        return values.sum(-1) * self.step

    def cumulative(self, values: Tensor, after: float) -> Tensor:
        """[R, V] integrals from the first point, of values that are 0 before and `after` after."""
        ends = (values.new_zeros(*values.shape[:-1], 2), values.new_full((len(values), 2), after))
        padded = torch.cat([ends[0], values, ends[1]], -1)
        count = values.shape[-1] - 1
        cells = sum(w * padded[..., i : i + count] for i, w in enumerate(_RULE))
        sums = (cells * (self.step.unsqueeze(-1) / 1440)).cumsum(-1)
        return torch.cat([torch.zeros_like(sums[..., :1]), sums], -1)

    def locate(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the cell of each y [..., R], and the position in it from 0 to 1."""
        place = ((y - self.low) / self.step).clamp(0, self.count - 1)
        cell = place.floor().clamp_max(self.count - 2)
        return cell.long(), place - cell

    def place(self, cell: Tensor, position: Tensor) -> Tensor:
        """The inverse of `locate`."""
        return self.low + self.step * (cell + position)

    def width(self, cell: Tensor) -> Tensor:
        """[..., R] the widths of cells: all the same."""
        return self.step.expand(cell.shape)


def fits(low: Tensor, high: Tensor, step: Tensor) -> Tensor:
    """[R] whether a uniform grid of at most `LIMIT` points has steps of at most `step`.

    Example:
        >>> fits(torch.zeros(2), torch.tensor([1.0, 1000.0]), torch.tensor([0.1, 0.1]))
        tensor([ True, False])
    """
    return ((high - low) / step).ceil() <= LIMIT - 1


def normal_log_prob(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Log N(y; mean, variance).

    Example:
        >>> normal_log_prob(*torch.tensor([0.0, 0.0, 1.0]))
        tensor(-0.9189)
    """
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi))
