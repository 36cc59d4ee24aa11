"""A short summary of a model's logits, by which a resumed evaluation recognises its model.

The logits of a batch are projected onto fixed directions: every row and every class counts, with a
factor of its own, so that another order of the classes and a change in any row are seen.

Legend: D directions, N rows, V classes, G groups of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from afterdrop.evaluation.rounding import epsilon_across_devices, tolerance

_DIRECTIONS = (2.0, 3.0, 5.0)  # their square roots are the frequencies of the factors
_ROWS = 7.0  # that of the factors of rows
_GROUPS = 1024  # rows beyond that share sums, so that the summary stays short
_ELEMENTS = 2**22  # that are projected at once, in float64
_LARGE = 32.0  # logits beyond that, of either sign, count by their logarithm
_MASKED = 1e6  # logits beyond that mark classes that cannot occur


class OutputSummary(NamedTuple):
    """What identifies the logits of a batch.

    Attributes:
        projections: [D, G] their projections, in float64.
        epsilon: Of the coarsest dtype that they were computed with.
    """

    projections: Tensor
    epsilon: float

    def joined(self, other: OutputSummary) -> OutputSummary:
        """A summary of two outputs."""
        projections = torch.cat([self.projections, other.projections], 1)
        return OutputSummary(projections, max(self.epsilon, other.epsilon))

    def matches(self, kept: Tensor, *, same_device: bool = True) -> bool:
        """Whether other projections are of the same logits, up to rounding.

        Args:
            kept: The other projections.
            same_device: Whether both were computed on devices of one kind.

        Example:
            >>> logits = torch.tensor([[1.0, 2.0, 4.0]])
            >>> found = summary(logits)
            >>> found.matches(summary(logits * 1.000001).projections)
            True
            >>> found.matches(summary(logits.flip(-1)).projections)
            False
        """
        if (kept.shape, kept.dtype) != (self.projections.shape, self.projections.dtype):
            return False
        size = self.projections.square().mean().sqrt()
        epsilon = self.epsilon if same_device else epsilon_across_devices(self.epsilon)
        return bool(((kept - self.projections).abs() <= tolerance(epsilon) * size).all())


def summary(logits: Tensor, epsilon: float | None = None) -> OutputSummary:
    """Projects the logits of a batch.

    Args:
        logits: [..., V] the logits, on a device that has float64.
        epsilon: Of the coarsest dtype that they were computed with; by default of their own.
    """
    rows_NV = logits.flatten(0, -2)
    count, classes = rows_NV.shape
    groups = max(1, min(count, _GROUPS))
    device = logits.device
    found_GD = torch.zeros(groups, len(_DIRECTIONS), dtype=torch.float64, device=device)
    factors_VD = torch.stack([_factors(classes, number) for number in _DIRECTIONS], -1).to(device)
    factors_N = _factors(count, _ROWS).to(device)
    groups_N = torch.arange(count, device=device) % groups
    step = max(1, _ELEMENTS // max(classes, 1))
    for start in range(0, count, step):
        part = slice(start, start + step)
        projected_ND = _compressed(rows_NV[part].double()) @ factors_VD
        found_GD.index_add_(0, groups_N[part], projected_ND * factors_N[part, None])
    epsilon = torch.finfo(logits.dtype).eps if epsilon is None else epsilon
    return OutputSummary(found_GD.T.contiguous().cpu(), epsilon)


def _factors(count: int, number: float) -> Tensor:
    """Fixed factors, spread over both signs without a period."""
    position = torch.arange(1, count + 1, dtype=torch.float64)
    # Not the cosine itself, which may be near 0: every row and class must count.
    wave = torch.cos(position.square() * number**0.5)
    return torch.where(wave < 0, wave - 1, wave + 1)


def _compressed(x: Tensor) -> Tensor:
    """Logits, of which the large ones do not hide the others: −10,000 is a common mask.

    Those that are infinite, not a number, or larger masks become numbers of ordinary size.
    """
    size, sign = x.abs(), x.sign()
    found = x.where(size <= _LARGE, sign * _LARGE * (1 + (size / _LARGE).log()))
    return found.where(size < _MASKED, 10 * sign.nan_to_num(2.0))
