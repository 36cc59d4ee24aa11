"""A mixture of softmaxes (Yang et al., 2018, arXiv 1711.03953), as lamb has it.

    z_k  = D_proj(tanh(P_k y + q_k))           latent vectors of C components; y with output dropout
    π    = softmax(W y)                        prior weights, without bias
    p(c) = Σ_k π_k softmax_c(z_k tableᵀ + b)   one table and bias for all components

Everything is in log space. The result is not linear in y, so nothing that averages features or
logits in the place of distributions applies.

Legend: C components, N rows, V token types, E embedding units, H hidden units; features are
[..., C·E + C], the latent vectors and then the prior's logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afterdrop.models.initial import embedding_normal_
from afterdrop.models.mask import Drop, MaskConfig

# Logits of all components that are computed at a time.
_AT_ONCE = {"cpu": 2**21, "cuda": 2**27}


class SoftmaxMixture(nn.Module):
    """From the output of a stack to the features of a mixture.

    Args:
        components: C.
        input_size: H.
        embedding_size: E.
        projection_dropout: Site on the latent vectors.
        generator: Generator of the initial weights; None is torch's global one.

    Example:
        >>> mixture = SoftmaxMixture(3, input_size=4, embedding_size=2)
        >>> features = mixture(torch.ones(5, 1, 4))
        >>> features.shape
        torch.Size([5, 1, 9])
        >>> latent, prior = mixture.split(features)
        >>> latent.shape, prior.shape
        (torch.Size([5, 1, 3, 2]), torch.Size([5, 1, 3]))
    """

    def __init__(
        self,
        components: int,
        input_size: int,
        embedding_size: int,
        projection_dropout: MaskConfig = MaskConfig(),  # noqa: B008 (frozen)
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.components, self.embedding_size = components, embedding_size
        self.temperature = 1.0  # of the components' logits, see `tempered`
        units = components * embedding_size
        self.projection = nn.Parameter(torch.empty(units, input_size))
        self.projection_bias = nn.Parameter(torch.empty(units))
        self.prior = nn.Parameter(torch.empty(components, input_size))
        self.projection_dropout = Drop(projection_dropout)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws new initial weights: standard deviation √(1 / H), biases 0."""
        for weight in (self.projection, self.prior):
            embedding_normal_(weight, generator)
        self.projection_bias.zero_()

    def extra_repr(self) -> str:
        """The number of components, for `print(model)`."""
        return f"components={self.components}"

    def forward(self, y_tBH: Tensor) -> Tensor:
        """Features [time, B, C·E + C]."""
        latent = torch.tanh(F.linear(y_tBH, self.projection, self.projection_bias))
        return torch.cat([self.projection_dropout(latent), F.linear(y_tBH, self.prior)], -1)

    def split(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Latent vectors [..., C, E] and the prior's logits [..., C] of features."""
        C, E = self.components, self.embedding_size
        latent, prior = features.split([C * E, C], -1)
        return latent.unflatten(-1, (C, E)), prior

    def log_probs(self, features: Tensor, table_VE: Tensor, bias_V: Tensor) -> Tensor:
        """Log-probabilities [..., V] of the mixture; see `mixture_log_probs`."""
        latent, prior = self.split(features)
        flat = mixture_log_probs(
            latent.flatten(0, -3), prior.flatten(0, -2), table_VE, bias_V, self.temperature
        )
        return flat.unflatten(0, features.shape[:-1])

    @contextmanager
    def tempered(self, temperature: float) -> Iterator[None]:
        """Divides the logits of every component by a temperature, for a while."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before


def mixture_log_probs(
    latent_NCE: Tensor,
    prior_NC: Tensor,
    table_VE: Tensor,
    bias_V: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities [N, V], log Σ_k π_k softmax_c(l_k / T), some rows at a time.

    Args:
        latent_NCE: Latent vectors.
        prior_NC: Logits of π.
        table_VE: The softmax table.
        bias_V: Its bias.
        temperature: T, which divides the logits l_k of the components and leaves π as it is.

    Example:
        >>> latent, table = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[9.0], [-9.0]])
        >>> prior = torch.tensor([[0.75, 0.25]]).log()
        >>> mixture_log_probs(latent, prior, table, torch.zeros(2)).exp()
        tensor([[0.7500, 0.2500]])
    """
    step = rows_at_once(latent_NCE, table_VE, _AT_ONCE)
    parts = [
        _rows_log_probs(latent_nCE, prior_nC, table_VE, bias_V, temperature)
        for latent_nCE, prior_nC in zip(latent_NCE.split(step), prior_NC.split(step))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows_log_probs(
    latent_nCE: Tensor, prior_nC: Tensor, table_VE: Tensor, bias_V: Tensor, temperature: float
) -> Tensor:
    logits_CnV = F.linear(latent_nCE.transpose(0, 1), table_VE, bias_V)
    if logits_CnV.dtype != torch.float64:
        logits_CnV, prior_nC = logits_CnV.float(), prior_nC.float()
    if temperature != 1:
        logits_CnV = logits_CnV / temperature
    return mixed_log_probs(logits_CnV, prior_nC)


def mixed_log_probs(logits_CnV: Tensor, prior_nC: Tensor) -> Tensor:
    """Log-probabilities [n, V] of the mixture, from the logits of its components.

    Example:
        >>> logits, prior = torch.tensor([[[9.0, -9.0]], [[-9.0, 9.0]]]), torch.zeros(1, 2)
        >>> mixed_log_probs(logits, prior).exp()
        tensor([[0.5000, 0.5000]])
    """
    shift_Cn1 = prior_nC.log_softmax(-1).t().unsqueeze(-1) - logits_CnV.logsumexp(-1, True)
    return (logits_CnV + shift_Cn1).logsumexp(0)


def rows_at_once(latent_NCE: Tensor, table_VE: Tensor, limits: dict[str, int]) -> int:
    """The rows whose logits of all components stay within the limit of the device."""
    limit = limits.get(latent_NCE.device.type, limits["cpu"])
    return max(1, limit // (latent_NCE.shape[1] * len(table_VE)))
