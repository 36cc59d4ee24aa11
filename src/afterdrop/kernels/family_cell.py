"""Steps of many mask samples of a language model at once, masks drawn where they are used.

Rows are multipliers × windows × samples, samples innermost. A program has some units of some
samples of one window and loops over the multipliers, which share their uniforms: a unit is dropped
when u < multiplier · rate.

Letters: M multipliers, W windows, P places (windows, or windows × time steps), K samples, H units
(padded); a site is given by the words of its places and units (`uniform.words`) and the rate of
each multiplier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.lstm_forward import tanh
from afterdrop.kernels.uniform import Draws, uniform

_DROP = {"BLOCK_K": 32, "BLOCK_U": 64}
_CELL = {"BLOCK_K": 8, "BLOCK_U": 64, "num_warps": 4}  # small: programs in flight hide loads
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


@triton.jit(do_not_specialize=["W", "t"])
def _cell(
    gates,  # [rows, 4H] before bias and nonlinearity
    bias,  # [4, H] float32
    c,  # [rows, H] float32
    own,  # [rows, stride_own]: where the next step's dropped h goes
    over,  # [rows, stride_over]: the next layer's dropped input; or features [M, W, time, K, H]
    total,  # [rows, H], the sum of layers so far
    plain,  # [M, W, time, K, H] the stack's output
    places_s,
    hashes_s,
    rates_s,
    places_o,
    hashes_o,
    rates_o,
    tables,
    keys,
    columns,
    size,
    inverse,
    below,
    W,
    K,
    M,
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
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    units = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    w = tl.program_id(1)
    parts = tl.cdiv(size, BLOCK_K)
    block = tl.program_id(2) // parts
    local = (tl.program_id(2) % parts) * BLOCK_K + tl.arange(0, BLOCK_K)
    real = units < H
    inside = (local[:, None] < size) & real[None, :]
    key = tl.load(keys + block)
    table = tables + block * columns * size
    u_s = tl.zeros((BLOCK_K, BLOCK_U), tl.float32)
    u_o = u_s
    if STATE:
        hashed = tl.load(hashes_s + units, mask=real, other=0)
        u_s = uniform(
            tl.load(places_s + w), hashed, key, table, columns, size, inverse, below, local
        )
    if OVER:
        hashed = tl.load(hashes_o + units, mask=real, other=0)
        u_o = uniform(
            tl.load(places_o + w), hashed, key, table, columns, size, inverse, below, local
        )
    b_j = tl.load(bias + units, mask=real, other=0.0)[None, :]
    b_o = tl.load(bias + H + units, mask=real, other=0.0)[None, :]
    b_f = tl.load(bias + 2 * H + units, mask=real, other=0.0)[None, :]
    b_i = tl.load(bias + 3 * H + units, mask=real, other=0.0)[None, :]
    for m in range(M):
        row = ((m * W + w) * K + block * size + local).to(tl.int64)[:, None]
        at = gates + row * 4 * H + units[None, :]
        j = tanh(tl.load(at, mask=inside, other=0.0).to(tl.float32) + b_j)
        o = tl.sigmoid(tl.load(at + H, mask=inside, other=0.0).to(tl.float32) + b_o)
        f = tl.sigmoid(tl.load(at + 2 * H, mask=inside, other=0.0).to(tl.float32) + b_f)
        i = tl.sigmoid(tl.load(at + 3 * H, mask=inside, other=0.0).to(tl.float32) + b_i)
        g = i
        if CAPPED:
            g = tl.minimum(1 - f, i)
        at_c = c + row * H + units[None, :]
        c_new = f * tl.load(at_c, mask=inside, other=0.0) + g * j
        tl.store(at_c, c_new, mask=inside)
        h = o * tanh(c_new)
        kept = h
        if STATE:
            rate = tl.load(rates_s + m)
            kept = tl.where(u_s >= rate, h * (1 / (1 - rate)), 0.0)
        tl.store(
            own + row * stride_own + units[None, :], kept.to(own.dtype.element_ty), mask=inside
        )
        at_total = total + row * H + units[None, :]
        y = h
        if SKIP:
            if not FIRST:
                y += tl.load(at_total, mask=inside, other=0.0).to(tl.float32)
            if not LAST:
                tl.store(at_total, y.to(total.dtype.element_ty), mask=inside)
        read = h
        place = row
        if LAST:
            read = y
            place = (((m * W + w) * time + t).to(tl.int64) * K + block * size + local)[:, None]
            tl.store(plain + place * H + units[None, :], y.to(plain.dtype.element_ty), mask=inside)
        if OVER:
            rate = tl.load(rates_o + m)
            read = tl.where(u_o >= rate, read * (1 / (1 - rate)), 0.0)
        tl.store(
            over + place * stride_over + units[None, :],
            read.to(over.dtype.element_ty),
            mask=inside,
        )


def cell(
    gates: Tensor,
    bias: Tensor,
    c: Tensor,
    own: Tensor,
    over: Tensor,
    total: Tensor,
    plain: Tensor,
    sites: tuple[Site | None, Site | None],
    draws: Draws,
    windows: int,
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
        sites: The state's site of the next step, and that of `over`; None drops nothing.
        draws: The plan.
        windows: W.
        multipliers: M.
        step: The time step and their number.
        form: Whether the input gate is capped, layers are summed, this is the first, the last one.
    """
    H = bias.shape[-1]
    none = (draws.keys,) * 3  # never read
    parts = draws.blocks * -(-draws.size // _CELL["BLOCK_K"])
    grid = (-(-H // _CELL["BLOCK_U"]), windows, parts)
    capped, skip, first, last = form
    _cell[grid](
        gates,
        bias,
        c,
        own,
        over,
        total,
        plain,
        *(sites[0] or none),
        *(sites[1] or none),
        *draws.arguments,
        windows,
        draws.blocks * draws.size,
        multipliers,
        H,
        step[1],
        step[0],
        own.stride(0),
        over.stride(0),
        CAPPED=capped,
        SKIP=skip,
        FIRST=first,
        LAST=last,
        STATE=sites[0] is not None,
        OVER=sites[1] is not None,
        **_CELL,
    )


def site(places: Tensor, units: Tensor, rates: list[float], device: torch.device) -> Site:
    """A site for the kernels."""
    return places, units, torch.tensor(rates, dtype=torch.float32, device=device)
