"""From the stack's output to the loss and back, in a training step in kernels: a mixture.

The components are rows of the softmax (`kernels.mixture_cross_entropy`), so the mixture over the
vocabulary is never computed. Logits are held for some time steps at a time.

Legend: R = time · rows places, C components, E embedding units, H hidden units, V token types; a
plus marks a padded size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterdrop.kernels.lstm_stack import Stack, product
from afterdrop.kernels.mixture_cross_entropy import mixture_cross_entropy
from afterdrop.kernels.mixture_latents import latent_gradients, latent_vectors
from afterdrop.kernels.training_masks import apply_mask
from afterdrop.models.fused import Copies
from afterdrop.models.mixture_copies import MixtureCopies
from afterdrop.train.fused_masks import StepMasks
from afterdrop.train.fused_output import LIFT, Trained
from afterdrop.train.whole_masks import RankRows

# Logits of all components that are held at a time: 2 GiB of float16.
_AT_ONCE = 2**30
# A gradient of logits is at most its scale, and float16 holds 65,504.
_MOST_LIFT = 2.0**15


class MixtureOutput:
    """Output dropout, latent vectors, logits of the components and loss, and their gradients.

    Args:
        copies: The weights.
        mixture: Those of the mixture.
        stack: The stack.
        masks: The masks of the step.
        rows: The rows of the batch that this rank computes.

    Attributes:
        dy: [R, H₊] the gradient of the stack's dropped output.
        d_table: [V₊, E₊] the gradient of the softmax table; column E is that of its bias.
        trained: The parameters of the mixture, with the gradients of a step.
    """

    def __init__(
        self,
        copies: Copies,
        mixture: MixtureCopies,
        stack: Stack,
        masks: StepMasks,
        rows: RankRows,
    ) -> None:
        self.copies, self.mixture, self.stack = copies, mixture, stack
        self.masks, self.rows = masks, rows
        half, (time, B, width) = copies.softmax, stack.out.shape
        C, H = mixture.module.prior.shape
        R, E = time * B, mixture.module.embedding_size
        self._y = half.new_zeros(R, width)
        self._y[:, H] = 1  # the column of its gradient is that of the projection's bias
        self._projected = torch.zeros(R, len(mixture.weight), device=half.device)
        self._d_projected = half.new_zeros(self._projected.shape)
        self._latents = half.new_zeros(R, C, half.shape[1])
        self._latents[..., E] = 1  # the column of its gradient is that of the softmax bias
        self._d_latents = torch.zeros(self._latents.shape, device=half.device)
        steps = min(time, max(1, _AT_ONCE // (B * C * len(half))))
        self._logits = half.new_zeros(steps * B * C, len(half))  # overwritten by their gradient
        self._parts = [range(at, min(at + steps, time)) for at in range(0, time, steps)]
        self._lift = LIFT * rows.samples
        self._scale = 1 / (self._lift * rows.batch)
        # Gradients of logits are divided by C on average. The others are sums over classes.
        self._logit_lift = min(self._lift * C, _MOST_LIFT)
        self.dy = torch.zeros(R, width, device=half.device)
        self.d_table = torch.zeros(half.shape, device=half.device)
        self._d_weight = torch.zeros(mixture.weight.shape, device=half.device)
        self.trained = self._trained(C, H)

    def _trained(self, C: int, H: int) -> list[Trained]:
        copies, own, d_weight = self.mixture, self.mixture.module, self._d_weight
        latents, prior = slice(0, copies.width), slice(copies.width, None)
        return [
            (own.projection, d_weight[latents], copies.weight[latents], C),
            (own.projection_bias, d_weight[latents, H], copies.bias, C),
            (own.prior, d_weight[prior], copies.weight[prior], 1),
        ]

    @property
    def summed(self) -> list[Tensor]:
        """The gradients that a step computes from the rows of this rank."""
        return [self.d_table, self._d_weight]

    def run(self, targets: Tensor, found: Tensor) -> None:
        """Computes losses and `dy`.

        Args:
            targets: [R].
            found: [1 or 2, targets], written: losses and, with several samples, their effective
                number.
        """
        mixture, own = self.mixture, self.mixture.module
        y, mask = self.stack.out.flatten(0, 1), self.masks.rows_of("projection")
        apply_mask(y, self.masks.rows_of("output"), self._y, own.prior.shape[1])
        product(self._y, mixture.weight.t(), self._projected)
        latent_vectors(self._projected, mixture.bias, mask, self._latents, own.embedding_size)
        for part in self._parts:
            self._softmax(part, targets, found)
            if part is not self._parts[-1]:  # else it can wait for `table_gradients`
                self._add_to_table(part)
        d_latents, ratio = self._d_latents.flatten(1), self._lift / self._logit_lift
        latent_gradients(d_latents, self._projected, mask, self._d_projected, ratio)
        product(self._d_projected, mixture.weight, self.dy, self._scale)

    def table_gradients(self) -> None:
        """Computes the gradients of the softmax table and of the mixture's weights."""
        self._add_to_table(self._parts[-1])
        product(self._d_projected.t(), self._y, self._d_weight, self._scale)

    def _places(self, part: range) -> slice:
        return slice(part.start * self.rows.count, part.stop * self.rows.count)

    def _logits_of(self, part: range) -> Tensor:
        return self._logits[: len(part) * self.rows.count * self.mixture.module.components]

    def _softmax(self, part: range, targets: Tensor, found: Tensor) -> None:
        """Losses of some time steps, and the gradients of their latent vectors and prior."""
        C, width, table = self.mixture.module.components, self.mixture.width, self.copies.softmax
        places, logits = self._places(part), self._logits_of(part)
        torch.mm(self._latents[places].flatten(0, 1), table.t(), out=logits)
        B = self.rows.count // self.rows.samples
        own = found[:, part.start * B : part.stop * B]
        mixture_cross_entropy(
            logits,
            self.copies.model.softmax_bias.detach(),
            self._projected[places, width : width + C],
            self._d_projected[places, width : width + C],
            targets[places],
            own[0],
            own[1] if len(own) > 1 else None,
            B,
            self._logit_lift,
            self._lift,
        )
        product(logits, table, self._d_latents[places].flatten(0, 1))

    def _add_to_table(self, part: range) -> None:
        """Adds the gradient of the softmax table from some time steps, whose logits are held."""
        latents = self._latents[self._places(part)].flatten(0, 1)
        scale = 1 / (self._logit_lift * self.rows.batch)
        logits_t, later = self._logits_of(part).t(), part is not self._parts[0]
        product(logits_t, latents, self.d_table, scale, add=later)
