"""Mogrifier rounds of a whole LSTM stack (equations in `models.mogrifier`), one launch per round.

A tick of the stack (see `lstm_forward`) first gates what its cells read, in place: the x̃ and h̃ of
layer l at time step t = tick − l. Round r gates v, which is x̃ if r is even and h̃ if it is odd:

    p = z_r U_rᵀ + b_r       v ← v · 2σ(p)       z_{r+1} = v D_{r+1}ᵀ

z_r, of K numbers per row, is all that a round needs of the other vector. A program handles some
units and rows of v. It sums z_r from the parts that the programs of the last launch have written,
and writes the part that its units have in z_{r+1}. An additional launch writes the parts of z_0.

Letters as in `lstm_forward`; K rank and W units, both padded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.lstm_forward import sigmoid


@triton.jit
def _write_part(
    v,  # [BLOCK_B, BLOCK_U] in the dtype of the products
    down,  # [K, W] of the layer
    part,  # [B, K] float32, of this block of units
    rows,
    units,
    B,
    width,
    W,
    K,
    BLOCK_K: tl.constexpr,
):
    """The part that some units have in v Dᵀ."""
    k = tl.arange(0, BLOCK_K)
    d = tl.load(
        down + k[None, :] * W + units[:, None],
        mask=(k[None, :] < K) & (units[:, None] < width),
        other=0.0,
    )
    inside = (rows[:, None] < B) & (k[None, :] < K)
    tl.store(part + rows[:, None] * K + k[None, :], tl.dot(v, d), mask=inside)


@triton.jit
def sum_parts(
    parts,  # [blocks, L, B, K] float32
    count,
    layer,
    rows,
    B,
    K,
    LAYERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The sum [BLOCK_B, BLOCK_K] of the parts of some blocks, always in the same order."""
    k = tl.arange(0, BLOCK_K)
    inside = (rows[:, None] < B) & (k[None, :] < K)
    total = tl.zeros((BLOCK_B, BLOCK_K), tl.float32)
    for block in range(count):
        at = parts + (block * LAYERS + layer) * B * K + rows[:, None] * K + k[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    return total


@triton.jit(do_not_specialize=["tick"])
def first_parts(
    tick,
    h,  # [L, time + 1, B, H]
    down,  # [L, K, W] of round 0
    parts,  # [blocks, L, B, K] float32, written
    time,
    B,
    H,
    W,
    K,
    LAYERS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The parts of z_0 = h̃ D_0ᵀ of every layer's step."""
    layer = tl.program_id(2)
    t = tick - layer
    if (t < 0) | (t >= time):
        return
    block = tl.program_id(1)
    units = block * BLOCK_U + tl.arange(0, BLOCK_U)
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tl.load(
        h + (layer * (time + 1) + t) * B * H + rows[:, None] * H + units[None, :],
        mask=(rows[:, None] < B) & (units[None, :] < H),
        other=0.0,
    )
    part = parts + (block * LAYERS + layer) * B * K
    _write_part(v, down + layer * K * W, part, rows, units, B, H, W, K, BLOCK_K)


@triton.jit(do_not_specialize=["tick"])
def forward_round(
    tick,
    v,  # [L, steps, B, stride], x̃ or h̃, gated in place
    before,  # [L, time, B, stride], written: v before this round
    z,  # [L, time, B, K], written
    parts,  # [blocks, L, B, K] float32: those of this round's z
    next_parts,  # those of the next round's, written
    up,  # [L, W, K]
    bias,  # [L, W] float32
    next_down,  # [L, K, W] of the next round
    time,
    B,
    H,
    W,
    K,
    steps,  # time for x̃, time + 1 for h̃
    stride,
    width_0,  # padded units of v in the first layer; H in the others
    blocks_0,  # parts of z in the first layer
    blocks,  # and in the others
    rank,  # the column of z that is 1, so that the bias gradient is a column of dU
    ones,  # the unit of h̃ that stays 1; -1 without one
    LAYERS: tl.constexpr,
    KEEP: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One round of every layer's step."""
    layer = tl.program_id(2)
    t = tick - layer
    if (t < 0) | (t >= time):
        return
    block = tl.program_id(1)
    width = tl.where(layer == 0, width_0, H)
    if block * BLOCK_U >= width:
        return
    units = block * BLOCK_U + tl.arange(0, BLOCK_U)
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    k = tl.arange(0, BLOCK_K)
    inside = (rows[:, None] < B) & (units[None, :] < width)
    place = rows[:, None] * stride + units[None, :]
    at_v = v + (layer * steps + t) * B * stride + place
    old = tl.load(at_v, mask=inside, other=0.0)
    u = tl.load(
        up + layer * W * K + units[None, :] * K + k[:, None],
        mask=(units[None, :] < width) & (k[:, None] < K),
        other=0.0,
    )
    b = tl.load(bias + layer * W + units, mask=units < width, other=0.0)
    count = tl.where(layer == 0, blocks_0, blocks)
    sums = sum_parts(parts, count, layer, rows, B, K, LAYERS, BLOCK_B, BLOCK_K)
    dtype = v.dtype.element_ty
    read = sums.to(dtype)
    gate = 2 * sigmoid(tl.dot(read, u) + b[None, :])
    new = tl.where(units[None, :] == ones, old.to(tl.float32), old.to(tl.float32) * gate).to(dtype)
    tl.store(at_v, new, mask=inside)
    if KEEP:
        tl.store(before + (layer * time + t) * B * stride + place, old, mask=inside)
        if block == 0:
            at_z = z + (layer * time + t) * B * K + rows[:, None] * K + k[None, :]
            kept = tl.where(k[None, :] == rank, 1.0, sums).to(dtype)
            tl.store(at_z, kept, mask=(rows[:, None] < B) & (k[None, :] < K))
    if not LAST:
        part = next_parts + (block * LAYERS + layer) * B * K
        next_d = next_down + layer * K * W
        _write_part(new, next_d, part, rows, units, B, width, W, K, BLOCK_K)
