"""From the stack's output to the loss and back, in a training step in kernels: one softmax.

`fused_mixture` does the same for a mixture of softmaxes.

Legend as in `models.fused`: R = time · rows places, H hidden units, E embedding units, V token
types; a plus marks a padded size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from afterdrop.kernels.cross_entropy import cross_entropy
from afterdrop.kernels.lstm_stack import Stack, product
from afterdrop.kernels.sample_cross_entropy import sample_cross_entropy
from afterdrop.kernels.training_masks import apply_mask
from afterdrop.models.fused import Copies
from afterdrop.train.fused_masks import StepMasks
from afterdrop.train.whole_masks import RankRows

# Scales gradients of logits, so that those of rare words fit into float16. Several samples divide
# them by their number on average, so it is multiplied by it.
LIFT = 64.0
# A parameter, its gradient, its copy, and the groups of rows that both are padded for.
Trained = tuple[nn.Parameter, Tensor, Tensor, int]


class SoftmaxOutput:
    """Output dropout, projection, logits and loss, and their gradients.

    Args:
        copies: The weights.
        stack: The stack.
        masks: The masks of the step.
        rows: The rows of the batch that this rank computes.

    Attributes:
        dy: [R, H₊] the gradient of the stack's dropped output.
        d_table: [V₊, E₊] the gradient of the softmax table; column E is that of its bias.
        trained: The parameters other than tables, with the gradients of a step.
    """

    def __init__(self, copies: Copies, stack: Stack, masks: StepMasks, rows: RankRows) -> None:
        self.copies, self.stack, self.masks, self.rows = copies, stack, masks, rows
        half, (time, B, width) = copies.softmax, stack.out.shape
        R, size = time * B, copies.model.embedding.shape[1]
        self._features = half.new_zeros(R, half.shape[1])
        self._features[:, size] = 1  # the column of its gradient is that of the bias
        self._logits = half.new_zeros(R, len(half))  # overwritten by their gradient
        self._lift = LIFT * rows.samples
        self._scale = 1 / (self._lift * rows.batch)
        self.dy = torch.zeros(R, width, device=half.device)
        self.d_table = torch.zeros(half.shape, device=half.device)
        self.trained: list[Trained] = []
        if copies.projection is not None and copies.model.projection is not None:
            self._y = half.new_zeros(R, width)
            self._d_projected = torch.zeros_like(self._features)
            self._d_projection = torch.zeros(copies.projection.shape, device=half.device)
            self.trained.append((copies.model.projection, self._d_projection, copies.projection, 1))

    @property
    def summed(self) -> list[Tensor]:
        """The gradients that a step computes from the rows of this rank."""
        return (
            [self.d_table] if self.copies.projection is None else [self.d_table, self._d_projection]
        )

    def run(self, targets: Tensor, found: Tensor) -> None:
        """Computes losses and `dy`.

        Args:
            targets: [R].
            found: [1 or 2, targets], written: losses and, with several samples, their effective
                number.
        """
        copies, size = self.copies, self.copies.model.embedding.shape[1]
        y, features, masks = self.stack.out.flatten(0, 1), self._features, self.masks
        if copies.projection is None:
            apply_mask(y, masks.rows_of("output"), features, size)
        else:
            apply_mask(y, masks.rows_of("output"), self._y, y.shape[1])
            projected = product(self._y, copies.projection.t())
            apply_mask(projected, masks.rows_of("projection"), features, size)
        logits, bias = self._logits, copies.model.softmax_bias.detach()
        torch.mm(features, copies.softmax.t(), out=logits)
        if (samples := self.rows.samples) > 1:
            B = self.rows.count // samples
            sample_cross_entropy(logits, bias, targets, found[0], found[1], B, self._lift)
        else:
            cross_entropy(logits, bias, targets, found[0], self._lift)
        if copies.projection is None:
            product(logits, copies.softmax, self.dy, self._scale)
            return
        d_features = product(logits, copies.softmax)
        width = d_features.shape[1]
        apply_mask(d_features, masks.rows_of("projection"), self._d_projected, width)
        product(self._d_projected, copies.projection, self.dy, self._scale)

    def table_gradients(self) -> None:
        """Computes the gradients of the softmax table and of the projection."""
        product(self._logits.t(), self._features, self.d_table, self._scale)
        if self.copies.projection is not None:
            product(self._d_projected.t(), self._y, self._d_projection, self._scale)
