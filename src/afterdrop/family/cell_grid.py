"""Grids whose cells are as narrow as the samples around them, and the rules that integrate there.

Legend: K samples, R rows (targets), C cells, V = 4C + 1 points of a grid.

A mean over samples may have peaks of very different widths: N(2, 0.001²) beside N(−2, 1). A uniform
grid with steps that suit the narrowest would have far too many points, and a coarser one misses
peaks. Here cells are halved until each suits the samples near it: at most two steps of a sample
wide within its interval, and wider in proportion to the distance from it. Each cell has the five
points of Gauss and Lobatto, which integrate polynomials of degree 7 exactly.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from afterdrop.family.grid_distribution import take

CELLS = 2**14  # cells of a row; one that needs more is left with wider ones
_WIDTH = 2  # of a cell, in steps of a sample: Simpson's rule then agrees within 1e-6
_STEPS = 4  # from point to point of a cell
_GROWTH = 2  # by how much cells are wider at a distance of half an interval
_NODES = (0.0, (1 - (3 / 7) ** 0.5) / 2, 0.5, (1 + (3 / 7) ** 0.5) / 2, 1.0)
_WEIGHTS = (1 / 20, 49 / 180, 16 / 45, 49 / 180, 1 / 20)
_SIMPSON = (1 / 6, 0.0, 2 / 3, 0.0, 1 / 6)  # a coarser rule on the same points
_AT_ONCE = 2**20  # pairs of a sample and a cell


@dataclasses.dataclass(frozen=True)
class CellGrid:
    """Cells of different widths for each row.

    Attributes:
        edges: [R, C + 1] where cells begin and end, ascending; the last ones may be the same.

    Example:
        >>> from afterdrop.family.uniform_grid import normal_log_prob
        >>> scale = torch.tensor([[1e-6], [1.0]], dtype=torch.float64)
        >>> ends = -7 * scale.amax(0), 7 * scale.amax(0)
        >>> grid = CellGrid.around(*ends, -7 * scale, 7 * scale, scale / 5)
        >>> log_f = [normal_log_prob(grid.points, 0 * s, s.square()) for s in scale]
        >>> mass = grid.log_integral(torch.stack(log_f))
        >>> grid.points.shape, bool(mass.abs().max() < 1e-6)
        (torch.Size([1, 1841]), True)
    """

    edges: Tensor
    discrete: bool = dataclasses.field(default=False, init=False)

    @classmethod
    def around(
        cls, low: Tensor, high: Tensor, starts: Tensor, ends: Tensor, steps: Tensor
    ) -> CellGrid:
        """A grid from low to high that suits samples in the intervals from starts to ends.

        Args:
            low: [R] the first points.
            high: [R] the last points.
            starts: [K, R] where samples begin.
            ends: [K, R] where they end.
            steps: [K, R] steps that suit them there.
        """
        left, right, steps = low.double(), high.double(), steps.double()
        rows = torch.arange(len(left), device=left.device)
        done: list[tuple[Tensor, Tensor]] = []
        counts = torch.ones_like(rows)
        while len(rows):
            middle = (left + right) / 2
            wide = right - left > _allowed(left, right, rows, starts, ends, steps)
            wide &= (left < middle) & (middle < right)
            wide &= counts[rows] < CELLS
            done.append((rows[~wide], left[~wide]))
            rows, left, middle, right = (t[wide] for t in (rows, left, middle, right))
            counts += rows.bincount(minlength=len(counts))
            left, right, rows = (
                torch.cat(pair) for pair in ((left, middle), (middle, right), (rows, rows))
            )
        found, starts_of = (torch.cat(parts) for parts in zip(*done))
        return cls(_table(found, starts_of, counts, high.double()))

    @functools.cached_property
    def _widths(self) -> Tensor:
        """[R, C] of the cells."""
        return self.edges.diff(dim=-1)

    @functools.cached_property
    def points(self) -> Tensor:
        """[R, V]."""
        nodes = self.edges.new_tensor(_NODES[:-1])
        inner = self.edges[:, :-1, None] + self._widths.unsqueeze(-1) * nodes
        return torch.cat([inner.flatten(1), self.edges[:, -1:]], -1)

    def _weights(self, rule: tuple[float, ...]) -> Tensor:
        """[R, V] of a rule for each cell."""
        weights = self._widths.unsqueeze(-1) * self.edges.new_tensor(rule)
        out = torch.cat([weights[..., :-1].flatten(1), torch.zeros_like(self.edges[:, :1])], -1)
        out[:, _STEPS::_STEPS] += weights[..., -1]
        return out

    @functools.cached_property
    def weights(self) -> Tensor:
        """[R, V] of the points in integrals."""
        return self._weights(_WEIGHTS)

    def log_integral(self, log_f: Tensor) -> Tensor:
        """[..., R] the logarithm of the integral of exp(log_f [..., R, V])."""
        return (log_f + self.weights.log()).logsumexp(-1)

    def integral_error(self, log_f: Tensor) -> Tensor:
        """[..., R] how far `log_integral` changes with Simpson's rule, which is far coarser."""
        simpson = (log_f + self._weights(_SIMPSON).log()).logsumexp(-1)
        return (self.log_integral(log_f) - simpson).abs()

    def integral(self, values: Tensor) -> Tensor:
        """[..., R] the integral of values [..., R, V]."""
        return (values * self.weights).sum(-1)

    def cumulative(self, values: Tensor, after: float) -> Tensor:
        """[R, V] integrals from the first point, of values that do not fall below 0."""
        inner = values[:, :-1].unflatten(1, (-1, _STEPS))
        cells = torch.cat([inner, values[:, _STEPS::_STEPS, None]], -1)
        parts = (cells @ _up_to(values)) * self._widths.unsqueeze(-1)
        before = parts[..., -1].cumsum(-1) - parts[..., -1]
        found = (before.unsqueeze(-1) + parts[..., :-1]).flatten(1)
        found = torch.cat([found, (before + parts[..., -1])[:, -1:]], -1)
        return found.cummax(-1).values

    def locate(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the interval between points of each y [..., R], and the position in it."""
        flat = y.reshape(-1, y.shape[-1]).t().contiguous()
        cell = torch.searchsorted(self.points, flat, right=True).t().reshape(y.shape) - 1
        cell = cell.clamp(0, self.points.shape[-1] - 2)
        width = self.width(cell)
        position = (y - take(self.points, cell)) / width.where(width > 0, 1.0)
        return cell, position.clamp(0.0, 1.0)

    def place(self, cell: Tensor, position: Tensor) -> Tensor:
        """The inverse of `locate`."""
        return take(self.points, cell) + self.width(cell) * position

    def width(self, cell: Tensor) -> Tensor:
        """[..., R] the distances between points."""
        return take(self.points, cell + 1) - take(self.points, cell)


def _allowed(
    left: Tensor, right: Tensor, rows: Tensor, starts: Tensor, ends: Tensor, steps: Tensor
) -> Tensor:
    """How wide cells may be, for all samples."""
    out = torch.empty_like(left)
    size = max(1, _AT_ONCE // max(1, len(starts)))
    for at in range(0, len(left), size):
        part = slice(at, at + size)
        of = rows[part]
        start, end = starts[:, of], ends[:, of]
        distance = torch.maximum(start - right[part], left[part] - end).clamp_min(0.0)
        grown = 1 + _GROWTH * distance / ((end - start) / 2)
        out[part] = (_WIDTH * steps[:, of] * grown).amin(0)
    return out


def _table(rows: Tensor, left: Tensor, counts: Tensor, high: Tensor) -> Tensor:
    """Edges [R, C + 1] of cells that begin at `left` in `rows`; rows with fewer end in `high`."""
    order = left.argsort(stable=True)
    order = order[rows[order].argsort(stable=True)]
    first = counts.cumsum(0) - counts
    column = torch.arange(len(rows), device=rows.device) - first[rows[order]]
    table = high.unsqueeze(-1).repeat(1, int(counts.max()) + 1 if len(counts) else 2)
    table[rows[order], column] = left[order]
    return table


def _up_to(like: Tensor) -> Tensor:
    """[5, 5] weights of values at the points of a cell in integrals up to each of the points."""
    nodes = torch.tensor(_NODES, dtype=torch.float64, device=like.device).unsqueeze(-1)
    powers = torch.arange(len(_NODES), device=like.device)
    return torch.linalg.solve(nodes**powers, nodes ** (powers + 1) / (powers + 1), left=False).t()
