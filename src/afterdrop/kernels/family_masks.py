"""Masks of many samples of a language model at once, for all multipliers.

Rows are multipliers × windows × samples, samples innermost. Multipliers share their uniforms, and a
unit is dropped if u < multiplier · rate. So one number per unit holds its mask for all multipliers:
its level, the number of multipliers at which it is kept. Rows of the m-th multiplier (ascending)
keep it if m < level.

Letters: M multipliers, P places (windows, or time steps × windows), K samples, H units (padded). A
site is given by the words of its places and units (`uniform.words`) and by the strata that the
rates of the multipliers divide (`uniform.cuts`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.uniform import Draws, first_kept, strata

_LEVELS = {"BLOCK_K": 32, "BLOCK_U": 64}  # samples and units per program
_DROP = {"BLOCK_R": 8, "BLOCK_U": 128}  # rows and units per program
SiteWords = tuple[Tensor, Tensor, Tensor]  # words of places [P], of units [H], `cuts` [3, M]
LevelMask = tuple[Tensor, Tensor]  # levels [P · K, H], and cuts, whose first row is the rates


@triton.jit
def _levels(
    levels,  # [P, K, H] uint8
    places,
    hashes,
    cuts,
    tables,
    keys,
    bases,
    width,
    size,
    inverse,
    below,
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
    stratum, offset = strata(
        tl.load(places + p),
        tl.load(hashes + units, mask=units < H, other=0),
        tl.load(keys + block),
        tables + block * bases * width,
        bases,
        width,
        size,
        inverse,
        below,
        local,
    )
    level = tl.zeros((BLOCK_K, BLOCK_U), tl.int32)
    for m in range(M):
        level += (stratum >= first_kept(offset, cuts, m, M)[None, :]).to(tl.int32)
    row = (p * K + block * size + local).to(tl.int64)[:, None]
    tl.store(levels + row * H + units[None, :], level.to(tl.uint8), mask=inside)


def mask_levels(site: SiteWords, draws: Draws, units: int, out: Tensor) -> Tensor:
    """The number of multipliers at which each unit is kept, [P · K, H] uint8.

    Args:
        site: The site, with ascending rates.
        draws: The tables and keys of the plan.
        units: H.
        out: [≥ P · K, H] uint8, written.
    """
    places, hashes, divided = site
    samples = draws.blocks * draws.size
    parts = draws.blocks * -(-draws.size // _LEVELS["BLOCK_K"])
    grid = (
        len(places),
        -(-units // _LEVELS["BLOCK_U"]),
        parts,
    )  # only the first dimension may exceed 65,535
    _levels[grid](
        out,
        places,
        hashes,
        divided,
        draws.tables,
        draws.keys,
        *draws.numbers,
        samples,
        divided.shape[1],
        units,
        **_LEVELS,
    )
    return out[: len(places) * samples]


# `group` differs from call to call; specialised on it, the kernel would be compiled again.
@triton.jit(do_not_specialize=["group"])
def _drop(
    source,
    target,
    tokens,
    levels,
    rates,
    table_levels,
    table_rates,
    group,  # P · K, rows of one multiplier
    K,
    M,
    H,
    source_stride,
    target_stride,
    level_stride,
    GATHER: tl.constexpr,
    DROP: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    within = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    units = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)[None, :]
    inside = (within < group) & (units < H)
    if GATHER:  # all multipliers read the same rows
        token = tl.load(tokens + within // K, mask=within < group, other=0)
        x = tl.load(source + token * source_stride + units, mask=inside, other=0.0).to(tl.float32)
    if TABLE:
        at_level = table_levels + token * K + within % K
        whole = tl.load(at_level, mask=within < group, other=0).to(tl.int32)
    if DROP:
        level = tl.load(levels + within * level_stride + units, mask=inside, other=0).to(tl.int32)
    for m in range(tl.program_id(2), M, tl.num_programs(2)):
        row = m * group + within
        if not GATHER:
            at = source + row * source_stride + units
            x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        kept = x
        if TABLE:
            kept = tl.where(m < whole, kept * (1 / (1 - tl.load(table_rates + m))), 0.0)
        if DROP:
            kept = tl.where(m < level, kept * (1 / (1 - tl.load(rates + m))), 0.0)
        at_target = target + row * target_stride + units
        tl.store(at_target, kept.to(target.dtype.element_ty), mask=inside)


def drop_rows(
    source: Tensor,
    target: Tensor,
    mask: LevelMask | None,
    samples: int,
    multipliers: int,
    units: int,
    tokens: Tensor | None = None,
    table_mask: LevelMask | None = None,
) -> None:
    """Drops units of rows, or of the rows of a table that tokens select.

    Args:
        source: [M · P · K, ...], or with `tokens` a table [V, ...].
        target: [M · P · K, ...], written.
        mask: The mask, or None to copy.
        samples: K.
        multipliers: M.
        units: H, the number of first columns that are written.
        tokens: [P], the row of the table for each place.
        table_mask: With `tokens`: the mask of whole rows of the table, levels [V · K, 1], applied
            before `mask`.
    """
    assert table_mask is None or tokens is not None
    group = len(target) // multipliers
    levels, rates = mask or (source, source)  # not read without a mask
    table_levels, table_rates = table_mask or (source, source)
    programs = 1 if tokens is not None else multipliers  # per block of rows and units
    grid = (-(-group // _DROP["BLOCK_R"]), -(-units // _DROP["BLOCK_U"]), programs)
    _drop[grid](
        source,
        target,
        source if tokens is None else tokens,
        levels,
        rates,
        table_levels,
        table_rates,
        group,
        samples,
        multipliers,
        units,
        source.stride(0),
        target.stride(0),
        levels.stride(0),
        GATHER=tokens is not None,
        DROP=mask is not None,
        TABLE=table_mask is not None,
        **_DROP,
    )
