"""Masks of many samples of a language model at once, for all multipliers.

Rows are multipliers × windows × samples, samples innermost. Multipliers share their uniforms, and a
unit is dropped when u < multiplier · rate: so a mask for all multipliers is a level, the number of
multipliers at which the unit is kept, and rows of the m-th (ascending) keep it if m < level.

Letters: M multipliers, P places (windows, or time steps × windows), K samples, H units (padded); a
site has the words of its places and units (`uniform.words`) and the rate of each multiplier.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.uniform import Draws, uniform

_DROP = {"BLOCK_K": 32, "BLOCK_U": 64}
Site = tuple[Tensor, Tensor, Tensor]  # words of places [P], of units [H], rates [M]


# Sizes that differ from call to call are not compiled in: every value would be compiled anew.
@triton.jit(do_not_specialize=["P"])
def _drop(
    source,
    target,
    tokens,
    places,
    hashes,
    rates,
    tables,
    keys,
    columns,
    size,
    inverse,
    below,
    P,
    K,
    M,
    H,
    source_stride,
    target_stride,
    GATHER: tl.constexpr,
    DROP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    units = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    p = tl.program_id(0)
    parts = tl.cdiv(size, BLOCK_K)
    block = tl.program_id(2) // parts
    local = (tl.program_id(2) % parts) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (local[:, None] < size) & (units[None, :] < H)
    u = tl.zeros((BLOCK_K, BLOCK_U), tl.float32)
    if DROP:
        hashed = tl.load(hashes + units, mask=units < H, other=0)
        u = uniform(
            tl.load(places + p),
            hashed,
            tl.load(keys + block),
            tables + block * columns * size,
            columns,
            size,
            inverse,
            below,
            local,
        )
    for m in range(M):
        row = ((m * P + p) * K + block * size + local).to(tl.int64)[:, None]
        if GATHER:
            at = source + tl.load(tokens + p) * source_stride + units[None, :] + 0 * row
        else:
            at = source + row * source_stride + units[None, :]
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            rate = tl.load(rates + m)
            x = tl.where(u >= rate, x * (1 / (1 - rate)), 0.0)
        tl.store(
            target + row * target_stride + units[None, :],
            x.to(target.dtype.element_ty),
            mask=inside,
        )


def drop(
    source: Tensor,
    target: Tensor,
    site: Site | None,
    draws: Draws,
    places: int,
    multipliers: int,
    units: int,
    tokens: Tensor | None = None,
) -> None:
    """Drops units of rows, or of the rows of a table that tokens name.

    Args:
        source: [M · P · K, ...], or a table [V, ...] with `tokens`.
        target: [M · P · K, ...], written.
        site: The site, or None to copy.
        draws: The plan.
        places: P.
        multipliers: M.
        units: H.
        tokens: [P], the row of the table for each place.
    """
    none = (draws.keys,) * 3  # never read
    parts = draws.blocks * -(-draws.size // _DROP["BLOCK_K"])
    grid = (places, -(-units // _DROP["BLOCK_U"]), parts)  # the first may exceed 65,535
    _drop[grid](
        source,
        target,
        draws.keys if tokens is None else tokens,
        *(site or none),
        *draws.arguments,
        places,
        draws.blocks * draws.size,
        multipliers,
        units,
        source.stride(0),
        target.stride(0),
        GATHER=tokens is not None,
        DROP=site is not None,
        **_DROP,
    )


@triton.jit(do_not_specialize=["P"])
def _levels(
    levels,  # [P, K, H] uint8
    places,
    hashes,
    rates,
    tables,
    keys,
    columns,
    size,
    inverse,
    below,
    P,
    K,
    M,
    H,
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    units = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    p = tl.program_id(0)
    parts = tl.cdiv(size, BLOCK_K)
    block = tl.program_id(2) // parts
    local = (tl.program_id(2) % parts) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (local[:, None] < size) & (units[None, :] < H)
    u = uniform(
        tl.load(places + p),
        tl.load(hashes + units, mask=units < H, other=0),
        tl.load(keys + block),
        tables + block * columns * size,
        columns,
        size,
        inverse,
        below,
        local,
    )
    level = tl.zeros((BLOCK_K, BLOCK_U), tl.int32)
    for m in range(M):
        level += (u >= tl.load(rates + m)).to(tl.int32)
    row = (p * K + block * size + local).to(tl.int64)[:, None]
    tl.store(levels + row * H + units[None, :], level.to(tl.uint8), mask=inside)


def mask_levels(site: Site, draws: Draws, units: int, out: Tensor) -> Tensor:
    """At how many of the multipliers each unit is kept, [P · K, H] uint8.

    Args:
        site: The site, its rates ascending.
        draws: The plan.
        units: H.
        out: [≥ P · K, H] uint8, written.
    """
    places, hashes, rates = site
    samples = draws.blocks * draws.size
    parts = draws.blocks * -(-draws.size // _DROP["BLOCK_K"])
    _levels[(len(places), -(-units // _DROP["BLOCK_U"]), parts)](
        out,
        places,
        hashes,
        rates,
        *draws.arguments,
        len(places),
        samples,
        len(rates),
        units,
        **_DROP,
    )
    return out[: len(places) * samples]
