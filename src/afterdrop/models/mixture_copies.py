"""The weights of a mixture of softmaxes in the form that the kernels read.

The latent vectors and the prior's logits are one product: the rows of the projection, padded for
each component, and then those of the prior.

Legend as in `softmax_mixture`: C components, R places, V token types, E embedding units, H hidden
units; a plus marks a padded size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterdrop.kernels.lstm_stack import padded, product
from afterdrop.models.softmax_mixture import SoftmaxMixture, mixed_log_probs, rows_at_once

# Logits of all components that are computed at a time, in float32.
_AT_ONCE = {"cpu": 2**21, "cuda": 2**27}


class MixtureCopies:
    """Padded copies of the weights of a mixture.

    Args:
        mixture: The mixture.
        dtype: Dtype of the operands of its products.

    Attributes:
        module: The mixture.
        width: C·E₊, the columns of the latent vectors among those of a product with `weight`.
        weight: [C·E₊ + C₊, H₊], the projection and then the prior.
        bias: [C·E₊] float32, of the projection.
    """

    def __init__(self, mixture: SoftmaxMixture, dtype: torch.dtype) -> None:
        self.module, device = mixture, mixture.prior.device
        C, H = mixture.prior.shape
        self.width = C * padded(mixture.embedding_size)
        rows = self.width + padded(C)
        self.weight = torch.zeros(rows, padded(H), dtype=dtype, device=device)
        self.bias = torch.zeros(self.width, device=device)

    @torch.no_grad()
    def pack(self) -> None:
        """Copies the current weights of the mixture."""
        mixture, (C, H) = self.module, self.module.prior.shape
        E = mixture.embedding_size
        projection = self.weight[: self.width].unflatten(0, (C, -1))
        projection[:, :E, :H].copy_(mixture.projection.view(C, E, H))
        self.bias.view(C, -1)[:, :E].copy_(mixture.projection_bias.view(C, E))
        self.weight[self.width : self.width + C, :H].copy_(mixture.prior)

    @torch.no_grad()
    def log_probs(self, y_RH: Tensor, table_VE: Tensor, bias_V: Tensor) -> Tensor:
        """Log-probabilities [R, V] in float32 without dropout, some places at a time.

        Args:
            y_RH: Outputs [R, H₊] of the stack.
            table_VE: The padded copy [V₊, E₊] of the softmax table.
            bias_V: Its bias.
        """
        C = self.module.components
        projected = product(y_RH.to(self.weight.dtype), self.weight.t())
        latent = torch.tanh(projected[:, : self.width] + self.bias).to(self.weight.dtype)
        latent_RCE, prior_RC = latent.unflatten(1, (C, -1)), projected[:, self.width :][:, :C]
        step = rows_at_once(latent_RCE, table_VE, _AT_ONCE)
        parts = []
        for latent_nCE, prior_nC in zip(latent_RCE.split(step), prior_RC.split(step)):
            logits = product(latent_nCE.flatten(0, 1), table_VE.t())[:, : len(bias_V)]
            logits_nCV = logits.add_(bias_V).unflatten(0, (-1, C))
            parts.append(mixed_log_probs(logits_nCV.transpose(0, 1), prior_nC))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
