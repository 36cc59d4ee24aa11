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
from afterdrop.train.fused_comparison import LogitComparison
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
        rows: The rows of the batch that this rank computes, of one pass.
        comparison: The penalty on the difference of the logits of two passes; None for one pass.

    Attributes:
        dy: [R, H₊] the gradient of the stack's dropped output.
        d_table: [V₊, E₊] the gradient of the softmax table; column E is that of its bias.
        trained: The parameters other than tables, with the gradients of a step.
    """

    def __init__(
        self,
        copies: Copies,
        stack: Stack,
        masks: StepMasks,
        rows: RankRows,
        comparison: LogitComparison | None = None,
    ) -> None:
        self.copies, self.stack, self.masks, self.rows = copies, stack, masks, rows
        self._comparison = comparison
        half, (time, B, width) = copies.softmax, stack.out.shape
        R, size = time * B, copies.model.embedding.shape[1]
        self._features = half.new_zeros(R, half.shape[1])
        self._features[:, size] = 1  # the column of its gradient is that of the bias
        self._scored = self._features  # those of the places that have a loss
        passes = 1 if comparison is None else comparison.losses
        # Overwritten by their gradient.
        self._logits = half.new_zeros(passes * time * rows.count, len(half))
        self._lift = LIFT * rows.samples
        self._scale = 1 / (self._lift * passes * rows.batch)
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
        copies, masks = self.copies, self.masks
        self._write_features()
        if self._comparison is not None:
            self._scored = self._comparison.compare(self._features)
            targets = self._comparison.targets(targets)
        logits, bias = self._logits, copies.model.softmax_bias.detach()
        torch.mm(self._scored, copies.softmax.t(), out=logits)
        if (samples := self.rows.samples) > 1:
            B = self.rows.count // samples
            sample_cross_entropy(logits, bias, targets, found[0], found[1], B, self._lift)
        else:
            cross_entropy(logits, bias, targets, found[0], self._lift)
        if copies.projection is None:
            self._feature_gradient(self._scale, self.dy)
            return
        d_features = self._feature_gradient(1.0)
        width = d_features.shape[1]
        apply_mask(d_features, masks.rows_of("projection"), self._d_projected, width)
        product(self._d_projected, copies.projection, self.dy, self._scale)

    def _write_features(self) -> None:
        """Writes the dropped input of the softmax."""
        copies, masks, size = self.copies, self.masks, self.copies.model.embedding.shape[1]
        y = self.stack.out.flatten(0, 1)
        if copies.projection is None:
            apply_mask(y, masks.rows_of("output"), self._features, size)
            return
        apply_mask(y, masks.rows_of("output"), self._y, y.shape[1])
        projected = product(self._y, copies.projection.t())
        apply_mask(projected, masks.rows_of("projection"), self._features, size)

    def _feature_gradient(self, scale: float, out: Tensor | None = None) -> Tensor:
        """The gradient of the features from that of the logits, times `scale`."""
        if self._comparison is None:
            return product(self._logits, self.copies.softmax, out, scale)
        of_losses = product(self._logits, self.copies.softmax, scale=scale)
        return self._comparison.feature_gradient(of_losses, scale / self._scale, out)

    def table_gradients(self) -> None:
        """Computes the gradients of the softmax table and of the projection."""
        product(self._logits.t(), self._scored, self.d_table, self._scale)
        if self._comparison is not None:
            self._comparison.add_table_gradient(self.d_table)
        if self.copies.projection is not None:
            product(self._d_projected.t(), self._y, self._d_projection, self._scale)
