"""The mask of a dropout site for every row of a forward pass: how it is drawn and applied.

Legend: M multipliers, S samples, B examples.
"""

import dataclasses

import torch
from torch import Tensor

from afterdrop.masks.layout import Layout, coordinates
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import uniforms


@dataclasses.dataclass(frozen=True)
class RowMask:
    """A mask whose rows are unfolded to [M, S, B], and the rate at which each multiplier drops.

    `unfold` brings the site's tensor into the same form, so that factors per multiplier broadcast.

    Attributes:
        mask: 1 where a unit is kept, 0 where it is dropped.
        rate: The rate of dropping, or one per multiplier in a shape that broadcasts with `mask`.
        dim: The dimension of the site's tensor that holds the rows, or None if none does.
        sizes: What that dimension unfolds to.
    """

    mask: Tensor
    rate: Tensor | float
    dim: int | None
    sizes: tuple[int, ...]

    def unfold(self, x: Tensor) -> Tensor:
        """The tensor with its row dimension unfolded like the mask."""
        return x if self.dim is None else x.unflatten(self.dim, self.sizes)

    def drop(self, x: Tensor) -> Tensor:
        """Plain dropout: x / (1 − rate) where kept, 0 elsewhere. Overwrites the mask."""
        scaled = self.mask.div_(1.0 - self.rate)
        if scaled.numel() == x.numel():
            return scaled.mul_(self.unfold(x)).reshape(x.shape)
        return (self.unfold(x) * scaled).reshape(x.shape)

    def attention(self, scores: Tensor, causal: bool) -> Tensor:
        """Attention weights after dropout. May overwrite the scores and the mask."""
        return self.drop(attention_weights(scores, causal))


def attention_weights(scores: Tensor, causal: bool) -> Tensor:
    """The softmax of scores [..., queries, keys].

    Args:
        scores: Overwritten if `causal`.
        causal: Whether a query sees no later keys.

    Example:
        >>> attention_weights(torch.zeros(2, 2), causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(ahead, float("-inf"))
    return scores.softmax(-1)


def draw_row_mask(
    rows: Rows, key: int, layout: Layout, like: Tensor, rates: tuple[float, ...]
) -> RowMask:
    """Draws the mask of a dropout site for every row.

    Args:
        rows: The rows of this pass.
        key: The key of the site and call.
        layout: Where the rows lie in `like`.
        like: A tensor of the mask's shape, dtype and device. Its values are not read.
        rates: The rates at which the site drops, one per multiplier of `rows`.
    """
    if layout.dim is None:
        u = _shared_uniforms(rows, key, layout, like)
        return RowMask(_at_least(u, rates[0], like.dtype), rates[0], None, ())
    u, at, flattened = _unfolded_uniforms(rows, key, layout, like)
    u = u.unsqueeze(at)
    unfolded = [len(rates), len(rows.samples), len(rows.examples)]
    threshold: Tensor | float = rates[0]
    if len(rates) > 1:
        column = [len(rates)] + [1] * (u.dim() - at - 1)
        threshold = torch.tensor(rates, dtype=torch.float32, device=like.device).view(column)
    sizes = tuple(flattened + unfolded if at > layout.dim else unfolded + flattened)
    return RowMask(_at_least(u, threshold, like.dtype), threshold, layout.dim, sizes)


def row_uniforms(rows: Rows, key: int, layout: Layout, like: Tensor) -> Tensor:
    """Uniforms in the shape of `like`, different for each row; for a single multiplier."""
    if layout.dim is None:
        return _shared_uniforms(rows, key, layout, like)
    return _unfolded_uniforms(rows, key, layout, like)[0].reshape(like.shape)


def _shared_uniforms(rows: Rows, key: int, layout: Layout, like: Tensor) -> Tensor:
    examples = rows.examples[:1] if layout.varies else None
    return uniforms(rows.plan, key, rows.samples, examples, like.shape, like.device)[0, 0]


def _unfolded_uniforms(
    rows: Rows, key: int, layout: Layout, like: Tensor
) -> tuple[Tensor, int, list[int]]:
    """Uniforms with [S, B] in place of the rows, that dimension, and what is flattened with it."""
    coords, at, flattened = coordinates(list(like.shape), layout, len(rows))
    u = uniforms(rows.plan, key, rows.samples, rows.keys(layout), coords, like.device)
    return u.movedim((0, 1), (at, at + 1)), at, flattened


def _at_least(u: Tensor, threshold: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`u >= threshold` as 0 and 1 in `dtype`, without a bool tensor in between."""
    shape = u.shape
    if isinstance(threshold, Tensor):
        shape = torch.broadcast_shapes(u.shape, threshold.shape)
    return torch.ge(u, threshold, out=torch.empty(shape, dtype=dtype, device=u.device))
