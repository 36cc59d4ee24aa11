"""A mask, and what dropout does with it."""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Keep:
    """A mask in structured form: rows unfolded to [L, S, B], and the rate of dropping of each.

    `unfold` brings the site's tensor into the same form, so that per-multiplier factors broadcast.
    """

    mask: Tensor
    rate: Tensor | float
    dim: int | None
    sizes: tuple[int, ...]

    def unfold(self, x: Tensor) -> Tensor:
        """The tensor with its row dimension unfolded like the mask."""
        return x if self.dim is None else x.unflatten(self.dim, self.sizes)

    def drop(self, x: Tensor) -> Tensor:
        """Plain dropout: `x` over the probability of keeping where kept, 0 elsewhere; once only."""
        scaled = self.mask.div_(1.0 - self.rate)
        if scaled.numel() == x.numel():
            return scaled.mul_(self.unfold(x)).reshape(x.shape)
        return (self.unfold(x) * scaled).reshape(x.shape)

    def attention(self, scores: Tensor, causal: bool) -> Tensor:
        """Dropout of attention's weights, whose memory may be that of the scores."""
        return self.drop(attention_weights(scores, causal))


def attention_weights(scores: Tensor, causal: bool) -> Tensor:
    """The softmax of scores [..., queries, keys]; `causal` hides later keys, in the scores, too.

    Example:
        >>> attention_weights(torch.zeros(2, 2), causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(ahead, float("-inf"))
    return scores.softmax(-1)
