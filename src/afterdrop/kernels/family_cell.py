"""Steps of many mask samples of a language model at once.

Rows are multipliers × windows × samples, samples innermost. Multipliers share their uniforms, and a
unit is dropped when u < multiplier · rate: so a mask for all multipliers is a level, the number of
multipliers at which the unit is kept, and rows of the m-th (ascending) keep it if m < level.

Letters: M multipliers, W windows, P places (windows, or time steps × windows), K samples, H units
(padded); a site is given by the words of its places and units (`uniform.words`) and the rate of
each multiplier.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.lstm_forward import tanh
from afterdrop.kernels.uniform import Draws, uniform

_DROP = {"BLOCK_K": 32, "BLOCK_U": 64}
_CELL = {"BLOCK_R": 4, "BLOCK_U": 256, "num_warps": 4}
Site = tuple[Tensor, Tensor, Tensor]  # words of places [P], of units [H], rates [M]
Mask = tuple[Tensor, Tensor]  # levels [W · K, H] and the rates [M]


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
    units = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    p = tl.program_id(1)
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
    grid = (-(-units // _DROP["BLOCK_U"]), places, parts)
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
    units = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    p = tl.program_id(1)
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
    _levels[(-(-units // _DROP["BLOCK_U"]), len(places), parts)](
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


@triton.jit(do_not_specialize=["group", "t"])
def _cell(
    gates,  # [rows, 4H] before bias and nonlinearity
    bias,  # [4, H] float32
    c,  # [rows, H] float32
    own,  # [rows, stride_own]: where the next step's dropped h goes
    over,  # [rows, stride_over]: the next layer's dropped input; or features [M, W, time, K, H]
    total,  # [rows, H], the sum of layers so far
    plain,  # [M, W, time, K, H] the stack's output
    levels_s,  # [W · K, H] of the state's mask
    rates_s,
    levels_o,  # the same of the mask of `over`
    rates_o,
    group,  # W · K, rows of one multiplier
    K,
    H,
    time,
    t,
    stride_own,
    stride_over,
    CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    STATE: tl.constexpr,
    OVER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    units = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)[None, :]
    within = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    m = tl.program_id(2)
    inside = (within < group) & (units < H)
    row = m.to(tl.int64) * group + within
    at = gates + row * 4 * H + units
    at_bias = bias + units
    real = units < H
    at_c = c + row * H + units
    at_total = total + row * H + units
    # All loads before all arithmetic, so that they are under way together.
    j = tl.load(at, mask=inside, other=0.0)
    o = tl.load(at + H, mask=inside, other=0.0)
    f = tl.load(at + 2 * H, mask=inside, other=0.0)
    i = tl.load(at + 3 * H, mask=inside, other=0.0)
    c_old = tl.load(at_c, mask=inside, other=0.0)
    if SKIP and not FIRST:
        below = tl.load(at_total, mask=inside, other=0.0)
    if STATE:
        level_s = tl.load(levels_s + within * H + units, mask=inside, other=0)
    if OVER:
        level_o = tl.load(levels_o + within * H + units, mask=inside, other=0)
    j = tanh(j.to(tl.float32) + tl.load(at_bias, mask=real, other=0.0))
    o = tl.sigmoid(o.to(tl.float32) + tl.load(at_bias + H, mask=real, other=0.0))
    f = tl.sigmoid(f.to(tl.float32) + tl.load(at_bias + 2 * H, mask=real, other=0.0))
    i = tl.sigmoid(i.to(tl.float32) + tl.load(at_bias + 3 * H, mask=real, other=0.0))
    g = i
    if CAPPED:
        g = tl.minimum(1 - f, i)
    c_new = f * c_old + g * j
    tl.store(at_c, c_new, mask=inside)
    h = o * tanh(c_new)
    kept = h
    if STATE:
        kept = tl.where(m < level_s.to(tl.int32), h * (1 / (1 - tl.load(rates_s + m))), 0.0)
    tl.store(own + row * stride_own + units, kept.to(own.dtype.element_ty), mask=inside)
    y = h
    if SKIP:
        if not FIRST:
            y += below.to(tl.float32)
        if not LAST:
            tl.store(at_total, y.to(total.dtype.element_ty), mask=inside)
    read = h
    place = row
    if LAST:
        read = y
        window = m * (group // K) + within // K
        place = (window * time + t).to(tl.int64) * K + within % K
        tl.store(plain + place * H + units, y.to(plain.dtype.element_ty), mask=inside)
    if OVER:
        read = tl.where(m < level_o.to(tl.int32), read * (1 / (1 - tl.load(rates_o + m))), 0.0)
    tl.store(over + place * stride_over + units, read.to(over.dtype.element_ty), mask=inside)


def cell(
    gates: Tensor,
    bias: Tensor,
    c: Tensor,
    own: Tensor,
    over: Tensor,
    total: Tensor,
    plain: Tensor,
    masks: tuple[Mask | None, Mask | None],
    samples: int,
    multipliers: int,
    step: tuple[int, int],
    form: tuple[bool, bool, bool, bool],
) -> None:
    """One step of one layer for all rows; see `_cell` for what is read and written.

    Args:
        gates: Products, without the bias.
        bias: Of the gates.
        c: Cells, moved on.
        own: The layer's own next input.
        over: The next layer's input, or for the last layer the features.
        total: Sum of layers.
        plain: The stack's output, written by the last layer.
        masks: The state's of the next step, and that of `over`; None drops nothing.
        samples: K.
        multipliers: M.
        step: The time step and their number.
        form: Whether the input gate is capped, layers are summed, this is the first, the last one.
    """
    H, group = bias.shape[-1], len(gates) // multipliers
    none = gates, gates  # never read
    capped, skip, first, last = form
    _cell[(-(-H // _CELL["BLOCK_U"]), -(-group // _CELL["BLOCK_R"]), multipliers)](
        gates,
        bias,
        c,
        own,
        over,
        total,
        plain,
        *(masks[0] or none),
        *(masks[1] or none),
        group,
        samples,
        H,
        step[1],
        step[0],
        own.stride(0),
        over.stride(0),
        CAPPED=capped,
        SKIP=skip,
        FIRST=first,
        LAST=last,
        STATE=masks[0] is not None,
        OVER=masks[1] is not None,
        **_CELL,
    )
