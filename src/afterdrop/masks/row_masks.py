"""A mask for every row of a forward pass."""

import torch
from torch import Tensor

from afterdrop.masks.keep import Keep
from afterdrop.masks.layout import Layout, coordinates
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import uniforms


def keep_mask(rows: Rows, key: int, layout: Layout, like: Tensor, rates: tuple[float, ...]) -> Keep:
    """1 where a unit is kept, 0 where it is dropped, for every row.

    Args:
        rows: The rows of this pass.
        key: The key of site and call.
        layout: Where the rows lie in `like`.
        like: A tensor of the mask's shape, dtype and device (only these are used).
        rates: At which the site drops, one per multiplier of `rows`.
    """
    if layout.dim is None:
        u = _shared_uniforms(rows, key, layout, like)
        return Keep(_at_least(u, rates[0], like.dtype), rates[0], None, ())
    u, at, flattened = _row_uniforms(rows, key, layout, like)
    u = u.unsqueeze(at)
    three = [len(rates), len(rows.samples), len(rows.examples)]
    threshold: Tensor | float = rates[0]
    if len(rates) > 1:
        column = [len(rates)] + [1] * (u.dim() - at - 1)
        threshold = torch.tensor(rates, dtype=torch.float32, device=like.device).view(column)
    sizes = tuple(flattened + three if at > layout.dim else three + flattened)
    return Keep(_at_least(u, threshold, like.dtype), threshold, layout.dim, sizes)


def row_uniforms(rows: Rows, key: int, layout: Layout, like: Tensor) -> Tensor:
    """Uniforms of `like`'s own shape, each row its own; one multiplier only."""
    if layout.dim is None:
        return _shared_uniforms(rows, key, layout, like)
    return _row_uniforms(rows, key, layout, like)[0].reshape(like.shape)


def _shared_uniforms(rows: Rows, key: int, layout: Layout, like: Tensor) -> Tensor:
    examples = rows.examples[:1] if layout.varies else None
    return uniforms(rows.plan, key, rows.samples, examples, like.shape, like.device)[0, 0]


def _row_uniforms(
    rows: Rows, key: int, layout: Layout, like: Tensor
) -> tuple[Tensor, int, list[int]]:
    """Uniforms with S and B where the rows lie, that dimension, and what is flattened with them."""
    coords, at, flattened = coordinates(list(like.shape), layout, len(rows))
    u = uniforms(rows.plan, key, rows.samples, rows.keys(layout), coords, like.device)
    return u.movedim((0, 1), (at, at + 1)), at, flattened


def _at_least(u: Tensor, threshold: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`u >= threshold` as 0 and 1 in `dtype`, written by the comparison itself (no bool pass)."""
    if not isinstance(threshold, Tensor):
        return torch.ge(u, threshold, out=torch.empty(u.shape, dtype=dtype, device=u.device))
    shape = torch.broadcast_shapes(u.shape, threshold.shape)
    return torch.ge(u, threshold, out=torch.empty(shape, dtype=dtype, device=u.device))
