"""Activation and temporal activation regularisation in a training step of kernels.

    activation             α/(n·H) Σ (mask∘h)²                      gradient 2α/(n·H) mask∘h
    temporal activation    β·time/((time−1)·n·H) Σ (h_t+1 − h_t)²

`penalties` defines them as means; these are the same numbers as sums over the rows of this rank,
with n the rows of the whole batch. Operations are torch's, on float32 buffers of the step; none of
them waits for the device, so that they can be recorded as part of a CUDA graph.

Legend: B rows, time (t) steps, H hidden units; padding units of the stack are 0 and add nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterdrop.train.penalties import active_penalties
from afterdrop.train.sections import ObjectiveSection
from afterdrop.train.whole_masks import RankRows


def add_activation(dropped: Tensor, gradient: Tensor, factor: float) -> Tensor:
    """Adds the gradient of factor · Σ dropped² and returns its value, a float64 scalar.

    Example:
        >>> gradient = torch.zeros(2)
        >>> add_activation(torch.tensor([1.0, 2.0]), gradient, 0.5), gradient
        (tensor(2.5000, dtype=torch.float64), tensor([1., 2.]))
    """
    gradient.add_(dropped, alpha=2 * factor)
    return factor * dropped.square().sum(dtype=torch.float64)


def add_temporal_activation(top_tBH: Tensor, gradient_tBH: Tensor, factor: float) -> Tensor:
    """Adds the gradient of factor · Σ (h_t+1 − h_t)² and returns its value, a float64 scalar.

    Example:
        >>> gradient = torch.zeros(3, 1, 1)
        >>> top = torch.tensor([1.0, 2.0, 5.0]).view(3, 1, 1)
        >>> add_temporal_activation(top, gradient, 0.5), gradient.flatten()
        (tensor(5., dtype=torch.float64), tensor([-1., -2.,  3.]))
    """
    change = top_tBH.diff(dim=0)
    gradient_tBH[1:].add_(change, alpha=2 * factor)
    gradient_tBH[:-1].sub_(change, alpha=2 * factor)
    return factor * change.square().sum(dtype=torch.float64)


class ActivationPenalties:
    """Both penalties, as far as their coefficients are above 0.

    Args:
        section: The coefficients.
        rows: The rows that are penalised, which come first in every buffer.
        time: Steps per window.
        hidden: H, without padding.
        values: What each penalty of `active_penalties` adds to the loss [P], written here.
    """

    def __init__(
        self, section: ObjectiveSection, rows: RankRows, time: int, hidden: int, values: Tensor
    ) -> None:
        self._rows = rows.count
        each = 1 / (rows.samples * rows.batch * hidden)
        self._activation = section.activation_penalty * each
        self._temporal = section.temporal_activation_penalty * each * time / max(1, time - 1)
        self._values = dict(zip(active_penalties(section), values))

    def add(self, top_tBH: Tensor, mask: Tensor | None, d_dropped: Tensor) -> Tensor | None:
        """Adds the gradients of the penalties to that of the stack's dropped output.

        Args:
            top_tBH: The output of the stack.
            mask: [time or 1, B, H], the mask of output dropout, or None.
            d_dropped: [time, B, H], the gradient. The temporal penalty has one with respect to the
                output that is not dropped, so with it this becomes the gradient of that output.

        Returns:
            The mask by which the gradient has yet to be multiplied, or None.
        """
        top, gradient = top_tBH[:, : self._rows], d_dropped[:, : self._rows]
        if self._activation > 0:
            dropped = top if mask is None else top * mask[:, : self._rows]
            self._values["activation"].copy_(add_activation(dropped, gradient, self._activation))
        if self._temporal == 0:
            return mask
        if mask is not None:
            d_dropped.mul_(mask)
        value = add_temporal_activation(top, gradient, self._temporal)
        self._values["temporal_activation"].copy_(value)
        return None
