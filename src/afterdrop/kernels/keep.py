"""Masks of any site in one kernel: the fast form of `masks.rows.keep_mask`, to the bit.

Letters: M multipliers, S samples, P examples, U units of an example (all its coordinates).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.uniform import Draws, draws, uniform, why_not_drawn
from afterdrop.masks import rows as plain
from afterdrop.masks.rows import Keep, Layout, Rows
from afterdrop.masks.uniforms import hashed, unit_words

_BLOCK_K, _BLOCK_U = 16, 128


@triton.jit(do_not_specialize=["S", "P", "M", "first"])
def _keep(
    mask,  # [M, S, P, U]
    places,
    hashes,
    rates,
    table,
    key,
    columns,
    size,
    inverse,
    below,
    S,
    P,
    M,
    U,
    first,
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    units = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    p = tl.program_id(1)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (units[None, :] < U)
    words = tl.load(hashes + units, mask=units < U, other=0)
    u = uniform(
        tl.load(places + p),
        words,
        tl.load(key),
        table,
        columns,
        size,
        inverse,
        below,
        tl.minimum(first + k, size - 1),
    )
    for m in range(M):
        at = mask + ((m * S + k).to(tl.int64) * P + p)[:, None] * U + units[None, :]
        kept = tl.where(u >= tl.load(rates + m), 1.0, 0.0)
        tl.store(at, kept.to(mask.dtype.element_ty), mask=inside)


@lru_cache(maxsize=64)
def _hashes(coords: tuple[int, ...], device: torch.device) -> Tensor:
    """The words of all units of an example [U], without that of the example."""
    words = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(coords):
        words = words.unsqueeze(-1) + hashed(dim, size, device)
    return words.flatten()


_draws = lru_cache(maxsize=16)(draws)


def keep_mask(rows: Rows, key: int, layout: Layout, like: Tensor, rate: float) -> Keep:
    """See `masks.rows.keep_mask`, which does what this kernel does not."""
    shape = list(like.shape)
    if layout.dim is None or why_not_drawn(rows.plan) or shape[layout.dim] % len(rows):
        return plain.keep_mask(rows, key, layout, like, rate)
    found = _draws(rows.plan, like.device)
    block, first = divmod(rows.samples.start, found.size)
    if rows.samples.stop > (block + 1) * found.size:
        return plain.keep_mask(rows, key, layout, like, rate)
    coords, at, flattened = plain.coordinates(shape, layout, len(rows))
    rates = torch.tensor([m * rate for m in rows.multipliers], device=like.device)
    places = unit_words(key, rows.keys(layout).to(like.device))
    mask = _mask(places, coords, rates, found, block, first, len(rows.samples), like.dtype)
    three = (len(rows.multipliers), len(rows.samples), len(rows.examples))
    mask = mask.view(*three, *coords).movedim((0, 1, 2), (at, at + 1, at + 2))
    column = [len(rates)] + [1] * (mask.dim() - at - 1)
    sizes = (*flattened, *three) if at > layout.dim else (*three, *flattened)
    return Keep(
        mask,
        rates.view(column) if len(rates) > 1 else rate * rows.multipliers[0],
        layout.dim,
        sizes,
    )


def _mask(
    places: Tensor,
    coords: Sequence[int],
    rates: Tensor,
    found: Draws,
    block: int,
    first: int,
    samples: int,
    dtype: torch.dtype,
) -> Tensor:
    """The masks [M, S, P, U]."""
    hashes = _hashes(tuple(coords), places.device)
    M, P, U = len(rates), len(places), len(hashes)
    mask = torch.empty(M, samples, P, U, dtype=dtype, device=places.device)
    _, _, *numbers = found.arguments
    _keep[(-(-U // _BLOCK_U), P, -(-samples // _BLOCK_K))](
        mask,
        places,
        hashes,
        rates,
        found.tables[block],
        found.keys[block:],
        *numbers,
        samples,
        P,
        M,
        U,
        first,
        BLOCK_K=_BLOCK_K,
        BLOCK_U=_BLOCK_U,
    )
    return mask
