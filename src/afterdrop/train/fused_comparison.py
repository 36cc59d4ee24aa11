"""Penalties that compare the logits of two passes, in a training step of kernels.

    penalty = κ/(n·V) Σ δᵀGδ        G = EᵀE, δ = f₁ − f₂        (`penalties` defines it as a mean)
    gradients    2κ/(n·V) Gδ of f₁ and its negative of f₂,  2κ/(n·V) E Σδδᵀ of E

E is the softmax table, f are features and n the rows of the first pass of the whole batch. There is
no pass over the logits. The second pass is more rows of the same launches, all rows of a pass
together: with fraternal dropout they have masks and a loss of their own, with expectation-linear
dropout their masks are 1 and they have no loss. Both passes start from the state of the first.

Operands of products are 16-bit, sums float32, as elsewhere in the step. G and Σδδᵀ are divided by
the number of terms before they are rounded, so that float16 can hold them.

Legend: R = time · 2B places, [time, 2, B], B rows of a pass, E features, V classes; a plus marks a
padded size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from afterdrop.kernels.lstm_stack import Stack, product
from afterdrop.train.penalties import active_penalties
from afterdrop.train.sections import ObjectiveSection
from afterdrop.train.whole_masks import RankRows


def compared_rows(section: ObjectiveSection, rows: RankRows) -> RankRows:
    """The rows of all passes of a step: twice as many if a penalty compares two passes.

    Example:
        >>> section = ObjectiveSection(2, window=5, fraternal_penalty=0.1)
        >>> compared_rows(section, RankRows(slice(0, 2), batch=2)).count
        4
    """
    compares = section.fraternal_penalty > 0 or section.expectation_linear_penalty > 0
    return replace(rows, samples=2 * rows.samples) if compares else rows


def undropped_rows(section: ObjectiveSection, rows: RankRows) -> int:
    """The number of rows, after those of the first pass, that have no dropout.

    Example:
        >>> section = ObjectiveSection(2, window=5, expectation_linear_penalty=0.1)
        >>> undropped_rows(section, RankRows(slice(0, 2), batch=2))
        2
    """
    return rows.count if section.expectation_linear_penalty > 0 else 0


class LogitComparison:
    """The penalty on the difference of the logits of two passes.

    Args:
        section: The coefficients, one of which is above 0.
        first: The rows of the first pass.
        time: Steps per window.
        table: [V₊, E₊] the copy of the softmax table; padding is 0.
        classes: V.
        values: What each penalty of `active_penalties` adds to the loss [P], written here.

    Attributes:
        losses: Passes whose loss counts.
    """

    def __init__(
        self,
        section: ObjectiveSection,
        first: RankRows,
        time: int,
        table: Tensor,
        classes: int,
        values: Tensor,
    ) -> None:
        name = "fraternal" if section.fraternal_penalty > 0 else "expectation_linear"
        coefficients = active_penalties(section)
        coefficient = coefficients[name]
        self._value = dict(zip(coefficients, values))[name]
        self.losses = 2 if name == "fraternal" else 1
        self._rows, self._table, self._classes = first.count, table, classes
        self._factor = 2 * coefficient / (first.samples * first.batch)
        half = time * first.count, table.shape[1]
        self._delta = table.new_zeros(half)
        self._gradient = torch.zeros(half, device=table.device)  # of the first pass
        self._first_features = None if self.losses == 2 else table.new_zeros(half)

    def start(self, stack: Stack) -> None:
        """Makes the second pass start from the state of the first."""
        for state in (stack.last, stack.c[:, -1]):
            state[:, self._rows :].copy_(state[:, : self._rows])

    def compare(self, features_RE: Tensor) -> Tensor:
        """Computes the penalty and its gradient.

        Args:
            features_RE: [R, E₊] of both passes, in the dtype of the table.

        Returns:
            The features of the passes whose loss counts: `features_RE`, or a copy of those of the
            first pass, always in the same tensor.
        """
        one, other = self._passes(features_RE).unbind(1)
        torch.sub(one, other, out=self._delta.view(one.shape))
        gram = product(self._table.t(), self._table, scale=1 / self._classes).to(self._table.dtype)
        product(self._delta, gram, self._gradient, self._factor)
        self._value.copy_((self._gradient * self._delta).sum(dtype=torch.float64) / 2)
        if self._first_features is None:
            return features_RE
        self._first_features.view(one.shape).copy_(one)
        return self._first_features

    def targets(self, targets_R: Tensor) -> Tensor:
        """The targets of the passes whose loss counts."""
        return targets_R if self.losses == 2 else self._passes(targets_R)[:, 0].flatten()

    def feature_gradient(
        self, of_losses: Tensor, factor: float, out: Tensor | None = None
    ) -> Tensor:
        """The gradient of all features: that of the losses plus `factor` times that of the penalty.

        Args:
            of_losses: The gradient of the features that `compare` returned, float32.
            factor: By how much that is larger than the gradient of the loss of the step.
            out: [R, E₊] float32, the result; None for a new tensor.

        Returns:
            `out`.
        """
        if out is None:
            rows, width = self._gradient.shape
            out = torch.empty(2 * rows, width, device=of_losses.device)
        one, other = self._passes(out).unbind(1)
        found = of_losses.view(len(one), self.losses, *one.shape[1:])
        gradient = self._gradient.view(one.shape)
        torch.add(found[:, 0], gradient, alpha=factor, out=one)
        if self.losses == 2:
            torch.sub(found[:, 1], gradient, alpha=factor, out=other)
        else:
            torch.mul(gradient, -factor, out=other)
        return out

    def add_table_gradient(self, d_table: Tensor) -> None:
        """Adds the gradient of the softmax table [V₊, E₊]."""
        delta, table = self._delta, self._table
        moments = product(delta.t(), delta, scale=1 / len(delta)).to(table.dtype)
        d_table.add_(product(table, moments), alpha=self._factor * len(delta) / self._classes)

    def _passes(self, x: Tensor) -> Tensor:
        """[time, 2, B, ...] of [R, ...]."""
        return x.unflatten(0, (-1, 2, self._rows))
