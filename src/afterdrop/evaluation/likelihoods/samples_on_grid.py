"""Samples of numbers at a temperature, on a grid that covers them, and sums over them.

Legend: K samples, S of a chunk, R rows (targets), V points of a grid, P parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.sample_grids import grid_of
from afterdrop.family.cell_grid import CellGrid
from afterdrop.family.grid_distribution import NumberGrid
from afterdrop.family.power_mean import PowerSums

_AT_ONCE = 2**21  # log-densities at a time


@dataclasses.dataclass(frozen=True)
class SamplesOnGrid:
    """Samples at a temperature, on a grid that covers them.

    Attributes:
        kind: The likelihood.
        parameters: [K, R, P].
        grid: The grid.
        at_y: [K, R] log-densities of the targets.
        power: 1/T, where the likelihood has no parameters for tempered samples.
        lift: [K, R] what normalises those.
    """

    kind: ParametricLikelihood
    parameters: Tensor
    grid: NumberGrid
    at_y: Tensor
    power: float = 1.0
    lift: Tensor | None = None

    @classmethod
    def of(
        cls,
        kind: ParametricLikelihood,
        parameters: Tensor,
        y: Tensor,
        temperature: float,
        ends: tuple[float, float],
    ) -> SamplesOnGrid:
        """Samples tempered by `temperature`, of which the mean will be tempered between `ends`."""
        closed = parameters if temperature == 1 else kind.tempered(parameters, temperature)
        if closed is not None:
            return cls(kind, closed, grid_of(kind, closed, ends), kind.log_prob(closed, y))
        grid = grid_of(kind, parameters, (min(1.0, temperature), max(1.0, temperature)))
        power = 1 / temperature
        lift = [
            -grid.log_integral(power * kind.log_prob(each.unsqueeze(-2), grid.points))
            for each in parameters
        ]
        at_y = power * kind.log_prob(parameters, y) + torch.stack(lift)
        return cls(kind, parameters, grid, at_y, power, torch.stack(lift))

    def log_density(self, part: slice) -> Tensor:
        """[S, R, V] of some samples."""
        lp = self.kind.log_prob(self.parameters[part].unsqueeze(-2), self.grid.points)
        return lp if self.lift is None else lp * self.power + self.lift[part].unsqueeze(-1)

    def levels(
        self, spans: Sequence[range], powers: tuple[float, ...]
    ) -> Iterator[list[tuple[range, PowerSums]]]:
        """Sums over independent blocks, then over pairs of them, up to all samples."""
        level = []
        if isinstance(self.grid, CellGrid):  # for `stated_error`
            powers = tuple(dict.fromkeys((*powers, 1.0)))
        step = max(1, _AT_ONCE // max(1, self.grid.points.numel()))
        for span in spans:
            sums = PowerSums(powers)
            for start in range(span.start, span.stop, step):
                sums.add(self.log_density(slice(start, min(start + step, span.stop))))
            level.append((span, sums))
        yield level
        while len(level) > 1:
            merged = []
            for (first, sums), (second, others) in zip(level[::2], level[1::2]):
                sums.merge(others)
                merged.append((range(first.start, second.stop), sums))
            level = merged
            yield level
