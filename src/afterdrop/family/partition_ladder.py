"""Log-partitions at many inverse temperatures by repeated squaring.

A partition ladder is a geometric sequence of inverse temperatures b, its powers, with 8 of them
per octave. Because

    exp(2 b δ) = exp(b δ)²          b = b₀ 2^(i/8)

only the lowest octave needs exponentials: each higher octave is the square of the one below it.

The temperature nodes (`Nodes`) lie between the powers. G is smooth in log b, so a polynomial
through the nearest powers gives its value at a node: within 1e-5 for log-probabilities of a
language model, within 3e-5 for the worst constructed ones (one class above thousands of equal
ones), which is a hundredth of the error of interpolating between the nodes. Differences of the
halves are kept at every fourth node. They are computed at every fourth power, which adds next to
nothing to the error of interpolating between those nodes.

Legend: P powers, J nodes, b = 1/T.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from afterdrop.family.temperature import COARSE, Nodes

PER_OCTAVE = 8  # powers per octave
OCTAVES = 8  # seven for the nodes, half of one below them and a little less than half above
HALVES_EVERY = 4  # differences of the halves use every fourth power
_POINTS = 14  # powers per interpolating polynomial: the error is then below 3e-5
_COARSE_POINTS = 8  # the same for every fourth power, where the nodes allow a larger error


@dataclasses.dataclass(frozen=True)
class PartitionLadder:
    """The powers around some nodes, and the weights that interpolate between them.

    Args:
        nodes: The nodes; they span at most seven octaves (see `reaches`).

    Example:
        >>> ladder = PartitionLadder(Nodes(0.125, 8.0))
        >>> [round(b, 4) for b in ladder.inverse[[0, 4, 63]].tolist()]
        [0.0884, 0.125, 20.7494]
        >>> found = ladder.fine @ ladder.inverse.log().sin()  # any smooth function of log b
        >>> bool((found - ladder.nodes.inverse().log().sin()).abs().max() < 1e-9)
        True
    """

    nodes: Nodes

    @staticmethod
    def reaches(nodes: Nodes) -> bool:
        """Whether a ladder spans the nodes."""
        low, high = nodes.inverse()[[0, -1]].tolist()
        return high <= low * 2.0 ** (OCTAVES - 1) * (1 + 1e-9)

    @functools.cached_property
    def inverse(self) -> Tensor:
        """The powers [P]: inverse temperatures, ascending, float64."""
        steps = torch.arange(OCTAVES * PER_OCTAVE, dtype=torch.float64) / PER_OCTAVE
        return self.nodes.inverse()[0] * torch.exp2(steps - 0.5)

    @functools.cached_property
    def fine(self) -> Tensor:
        """Weights [J, P]: values at the nodes from values at the powers."""
        return _weights(self.inverse, self.nodes.inverse(), _POINTS)

    @functools.cached_property
    def coarse(self) -> Tensor:
        """Weights [J / 4, P / 4]: values at the coarse nodes from those at every fourth power."""
        return _weights(self.inverse[::HALVES_EVERY], self.nodes.inverse(COARSE), _COARSE_POINTS)


def _weights(powers: Tensor, inverse: Tensor, points: int) -> Tensor:
    """Lagrange weights of the polynomials in log b through the nearest `points` powers."""
    gap = (powers[1] / powers[0]).log()
    at = (inverse / powers[0]).log() / gap  # position in units of the gap
    first = (at.floor().long() - points // 2 + 1).clamp(0, len(powers) - points)
    near = first.unsqueeze(1) + torch.arange(points)
    i = torch.arange(points, dtype=torch.float64)
    factors = (i.unsqueeze(1) - i).masked_fill(torch.eye(points, dtype=torch.bool), 1.0)
    x = (at - first).view(-1, 1, 1).expand(-1, points, points)
    others = (x - i).masked_fill(torch.eye(points, dtype=torch.bool), 1.0)
    found = torch.zeros(len(inverse), len(powers), dtype=torch.float64)
    return found.scatter_(1, near, others.prod(-1) / factors.prod(-1))
