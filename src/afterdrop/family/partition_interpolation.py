"""Log-partitions between the nodes of temperature.

G(b) = log Σ_c exp(b δ_c) is kept at the nodes (`Nodes`). The polynomial in s = log b through them
is exact to rounding for few classes. It is not where one class stands above many nearly equal ones:
G then bends from a straight line in b to 0 within 1/log V of s, since Σ_c exp(b δ_c) has zeros in
the complex plane at that distance, which are singularities of G. With V = 100,000 the polynomial is
off by 8e-3.

The sum itself has no singularities, but ranges from V to 1, so that rounding at its large values
would spoil the small ones. Divided by exp(p), with p the cubic part of G in s, it is near 1
everywhere and as smooth as before:

    G(b) ≈ p(b) + log Σ_j w_j(b) exp(G(b_j) − p(b_j))        w: weights of the interpolation

This is within 3e-6 for any number of classes up to 100,000 in a bracket of 1/8 to 8. In the widest
bracket (`WIDEST`) it is within 1e-4 for 10,000 classes and 2e-3 for 100,000.

Legend: N targets, J nodes, Q inverse temperatures b = 1/T; δ = log M − max, at most 0.
"""

import functools
import math

import torch
from torch import Tensor

from afterdrop.family.temperature import Nodes

_DEGREE = 3  # of p: fewer leave too large a range, more are as hard to interpolate as G
_COLUMNS = 1 << 13  # targets whose values are converted to float64 at once
_TAIL = 8  # highest coefficients of the polynomial that tell whether it has converged
_CONVERGED = 2e-6  # above float32's rounding; the polynomial is then within 1e-5


def is_smooth(values: Tensor, nodes: Nodes) -> bool:
    """Whether the polynomial through values [J, N] at the nodes gives what lies between.

    Example:
        >>> nodes = Nodes(0.125, 8.0)
        >>> margins = torch.tensor([2.0, 5.0])
        >>> G = (1 + torch.exp(-torch.outer(nodes.inverse(), margins))).log()  # of two classes
        >>> is_smooth(G, nodes)
        True
        >>> G = (1 + 9999 * torch.exp(-torch.outer(nodes.inverse(), margins))).log()
        >>> is_smooth(G, nodes)
        False
    """
    last = _coefficients(nodes.count)[-_TAIL:].to(values.dtype)
    tails = (last @ part for part in values.split(_COLUMNS, -1))
    return not any(bool((tail.abs() > _CONVERGED).any()) for tail in tails)  # NaN: nothing between


def between_nodes(values: Tensor, nodes: Nodes, inverse: Tensor) -> Tensor:
    """G [Q, N] at inverse temperatures [Q] from its values [J, N] at the nodes.

    Example:
        >>> nodes, margins = Nodes(0.125, 8.0), torch.tensor([9.0], dtype=torch.float64)
        >>> G = (1 + 9999 * torch.exp(-torch.outer(nodes.inverse(), margins))).log()
        >>> b = torch.tensor([1.02], dtype=torch.float64)
        >>> abs(between_nodes(G, nodes, b).item() - math.log1p(9999 * math.exp(-9 * 1.02))) < 1e-6
        True
    """
    trend = _coefficients(nodes.count)[: _DEGREE + 1]
    at_nodes, wanted = _basis(nodes.inverse(), nodes), _basis(inverse, nodes)
    found = []
    for part in values.split(_COLUMNS, -1):
        part = part.double()
        cubic = trend @ part
        rest = torch.addmm(part, at_nodes, cubic, alpha=-1).exp_()
        between = (nodes.weights(inverse) @ rest).clamp_min_(torch.finfo(torch.float64).tiny).log_()
        found.append(between.addmm_(wanted, cubic))
    return torch.cat(found, -1)


def interpolated(weights: Tensor, values: Tensor) -> Tensor:
    """The polynomial through values [..., J, N] at the nodes, with its weights [J], in float64.

    Example:
        >>> interpolated(torch.tensor([0.25, 0.75]).double(), torch.tensor([[0.0], [4.0]]))
        tensor([3.], dtype=torch.float64)
    """
    return torch.cat([weights @ part.double() for part in values.split(_COLUMNS, -1)], -1)


def _basis(inverse: Tensor, nodes: Nodes) -> Tensor:
    """Chebyshev polynomials [Q, degree + 1] of s."""
    angles = nodes.position(inverse).clamp(-1.0, 1.0).acos().unsqueeze(-1)
    return (angles * torch.arange(_DEGREE + 1, dtype=torch.float64)).cos()


@functools.lru_cache(maxsize=4)
def _coefficients(count: int) -> Tensor:
    """Chebyshev coefficients [J, J] of the polynomial through values at `count` nodes."""
    j = torch.arange(count, dtype=torch.float64)
    matrix = torch.outer(j, math.pi - j * math.pi / (count - 1)).cos() * 2 / (count - 1)
    matrix[:, [0, -1]] /= 2  # the ends count half, in nodes and in coefficients
    matrix[[0, -1]] /= 2
    return matrix
