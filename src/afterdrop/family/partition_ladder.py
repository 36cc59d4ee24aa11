"""Log-partitions at many temperatures for few exponentials: a ladder that is climbed by squaring.

    exp(2 b δ) = exp(b δ)²         rungs b = b₀ 2^(i/8), of which only the lowest octave needs exp

The nodes of temperature (`Nodes`) lie between the rungs. G is smooth in log b, so a polynomial
through the nearest rungs gives it there: on log-probabilities of a language model within 1e-5, on
the worst made-up ones (one class and thousands of equal ones) within 3e-5, a hundredth of what the
nodes themselves leave between them. Differences of halves are kept at every fourth node and have
every fourth rung only, which adds next to nothing to what those nodes leave.

Legend: R rungs, J nodes, b = 1/T.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from afterdrop.family.temperature import COARSE, Nodes

PER_OCTAVE = 8  # rungs an octave
OCTAVES = 8  # seven for the nodes, half a one below them and a little less above
HALVES_EVERY = 4  # of the rungs, for halves
_POINTS = 14  # rungs of a polynomial
_COARSE_POINTS = 8


@dataclasses.dataclass(frozen=True)
class PartitionLadder:
    """Rungs around nodes.

    Args:
        nodes: The nodes, within seven octaves.

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
        """Whether the rungs go as far as the nodes."""
        low, high = nodes.inverse()[[0, -1]].tolist()
        return high <= low * 2.0 ** (OCTAVES - 1) * (1 + 1e-9)

    @functools.cached_property
    def inverse(self) -> Tensor:
        """The inverse temperatures of the rungs [R], ascending, float64."""
        steps = torch.arange(OCTAVES * PER_OCTAVE, dtype=torch.float64) / PER_OCTAVE
        return self.nodes.inverse()[0] * torch.exp2(steps - 0.5)

    @functools.cached_property
    def fine(self) -> Tensor:
        """Weights [J, R]: values at the nodes from values at the rungs."""
        return _weights(self.inverse, self.nodes.inverse(), _POINTS)

    @functools.cached_property
    def coarse(self) -> Tensor:
        """Weights [Jc, R / 4]: values at the coarse nodes from values at every fourth rung."""
        return _weights(self.inverse[::HALVES_EVERY], self.nodes.inverse(COARSE), _COARSE_POINTS)


def _weights(rungs: Tensor, inverse: Tensor, points: int) -> Tensor:
    """Those of the polynomials through the nearest rungs, in log b."""
    gap = (rungs[1] / rungs[0]).log()
    at = (inverse / rungs[0]).log() / gap  # in rungs
    first = (at.floor().long() - points // 2 + 1).clamp(0, len(rungs) - points)
    near = first.unsqueeze(1) + torch.arange(points)
    i = torch.arange(points, dtype=torch.float64)
    factors = (i.unsqueeze(1) - i).masked_fill(torch.eye(points, dtype=torch.bool), 1.0)
    x = (at - first).view(-1, 1, 1).expand(-1, points, points)
    others = (x - i).masked_fill(torch.eye(points, dtype=torch.bool), 1.0)
    found = torch.zeros(len(inverse), len(rungs), dtype=torch.float64)
    return found.scatter_(1, near, others.prod(-1) / factors.prod(-1))
