"""The gradient of `mogrifier_forward`, tick by tick from the end of the window.

After `backward_cell` has written d_gates of layer l at time step t, the gradients of what its cell
read are two products, of x̃ with W and of h̃ with U. They go back through the rounds. For round r,
which gated v (with v₋ before it, g = 2σ(p) its gate):

    dv += dz_{r+1} D_{r+1}       v is what round r + 1 read; not for the last round
    dp = dv · v₋ · g (1 − g/2)        dv₋ = dv · g        dz_r = dp U_r

There is one launch per round and one more, which adds dz_0 D_0 to the gradient of h̃. As in the
forward pass, dz is summed from the parts that the programs of the last launch have written.

What comes out is the gradient of h̃, for the same layer at t − 1, and of x̃, for the layer below at
t, in the places from which `backward_cell` reads; that of the first layer is kept for the
embedding. The gradients of the weights of rounds are products over the whole window:
dU_r = dpᵀ z, whose column `rank` is the gradient of the bias, and dD_r = dzᵀ (what r read).

Letters as in `mogrifier_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.lstm_forward import sigmoid
from afterdrop.kernels.mogrifier_forward import sum_parts


@triton.jit(do_not_specialize=["tick"])
def cell_products(
    tick,
    d_gates,  # [L, time, B, 4H]
    w_x,  # [L, 4, H, X]
    w_h,  # [L, 4, H, H]
    products,  # [2, SPLITS, L, B, W] float32, written: of x̃ and of h̃
    time,
    B,
    H,
    X,
    W,
    width_0,  # padded inputs of the first layer
    LAYERS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One split of one of the two products that are the gradients of what a cell read."""
    layer = tl.program_id(1) // 2
    of_h = tl.program_id(1) % 2
    split = tl.program_id(2)
    t = time - 1 - (tick - (LAYERS - 1 - layer))
    if (t < 0) | (t >= time):
        return
    if of_h == 1:
        weight = w_h + layer * 4 * H * H
        stride = H
        width = H
    else:
        weight = w_x + layer * 4 * H * X
        stride = X
        width = tl.where(layer == 0, width_0, H)
    blocks = tl.cdiv(W, BLOCK_N)
    columns = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (tl.program_id(0) // blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    source = d_gates + (layer * time + t) * B * 4 * H
    share = tl.cdiv(4 * H, SPLITS * BLOCK_K) * BLOCK_K
    total = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, 4 * H), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        d = tl.load(
            source + rows[:, None] * 4 * H + k[None, :],
            mask=(rows[:, None] < B) & (k[None, :] < 4 * H),
            other=0.0,
        )
        w = tl.load(
            weight + k[:, None] * stride + columns[None, :],
            mask=(k[:, None] < 4 * H) & (columns[None, :] < width),
            other=0.0,
        )
        total = tl.dot(d, w, total)
    at = ((of_h * SPLITS + split) * LAYERS + layer) * B * W
    inside = (rows[:, None] < B) & (columns[None, :] < width)
    tl.store(products + at + rows[:, None] * W + columns[None, :], total, mask=inside)


@triton.jit
def _incoming(
    products,  # [SPLITS, L, B, W] float32, of this vector; with FRESH
    current,  # [L, B, W] float32, without
    layer,
    place,
    inside,
    count,  # B · W
    LAYERS: tl.constexpr,
    SPLITS: tl.constexpr,
    FRESH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """The gradient of a vector so far: that of the cell, or what a later round has left."""
    if FRESH:
        d = tl.zeros((BLOCK_B, BLOCK_U), tl.float32)
        for split in tl.static_range(SPLITS):
            at = products + (split * LAYERS + layer) * count + place
            d += tl.load(at, mask=inside, other=0.0)
    else:
        d = tl.load(current + layer * count + place, mask=inside, other=0.0)
    return d


@triton.jit
def _through_down(
    dz,  # [BLOCK_B, BLOCK_K] in the dtype of the products
    down,  # [K, W] of the layer
    units,
    width,
    W,
    K,
    BLOCK_K: tl.constexpr,
):
    """The gradient dz D of what a round read."""
    k = tl.arange(0, BLOCK_K)
    d = tl.load(
        down + k[:, None] * W + units[None, :],
        mask=(k[:, None] < K) & (units[None, :] < width),
        other=0.0,
    )
    return tl.dot(dz, d)


@triton.jit
def _keep(dz, d_z, rows, B, K, BLOCK_K: tl.constexpr):
    k = tl.arange(0, BLOCK_K)
    inside = (rows[:, None] < B) & (k[None, :] < K)
    at = d_z + rows[:, None] * K + k[None, :]
    tl.store(at, dz.to(d_z.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tick"])
def backward_round(
    tick,
    before,  # [L, time, B, stride], v before this round
    z,  # [L, time, B, K] of this round
    products,  # [SPLITS, L, B, W] float32, of this vector
    current,  # [L, B, W] float32, of this vector; updated
    parts,  # [blocks, L, B, K] float32: those of the next round's dz
    own_parts,  # those of this round's, written
    up,  # [L, W, K]
    bias,  # [L, W] float32
    next_down,  # [L, K, W] of the next round
    d_p,  # [L, time, B, W], written
    next_d_z,  # [L, time, B, K] of the next round, written
    over,  # [L, B, H] float32: the gradient of the layer above's x̃, for `backward_cell`
    d_x,  # [time, B, W] float32: that of the first layer's x̃
    time,
    B,
    H,
    W,
    K,
    stride,
    width_0,
    blocks_0,
    blocks,
    LAYERS: tl.constexpr,
    SPLITS: tl.constexpr,
    FRESH: tl.constexpr,
    LAST: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of one round of every layer's step."""
    layer = tl.program_id(2)
    t = time - 1 - (tick - (LAYERS - 1 - layer))
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
    narrow = (rows[:, None] < B) & (k[None, :] < K)
    step = layer * time + t
    dtype = up.dtype.element_ty
    place = rows[:, None] * W + units[None, :]
    at_v = before + step * B * stride + rows[:, None] * stride + units[None, :]
    v = tl.load(at_v, mask=inside, other=0.0).to(tl.float32)
    read = tl.load(z + step * B * K + rows[:, None] * K + k[None, :], mask=narrow, other=0.0)
    u = tl.load(
        up + layer * W * K + units[None, :] * K + k[:, None],
        mask=(units[None, :] < width) & (k[:, None] < K),
        other=0.0,
    )
    b = tl.load(bias + layer * W + units, mask=units < width, other=0.0)
    gate = 2 * sigmoid(tl.dot(read, u) + b[None, :])
    d = _incoming(
        products, current, layer, place, inside, B * W, LAYERS, SPLITS, FRESH, BLOCK_B, BLOCK_U
    )
    if not LAST:
        count = tl.where(layer == 0, blocks_0, blocks)
        dz = sum_parts(parts, count, layer, rows, B, K, LAYERS, BLOCK_B, BLOCK_K)
        d += _through_down(dz.to(dtype), next_down + layer * K * W, units, width, W, K, BLOCK_K)
        if block == 0:
            _keep(dz, next_d_z + step * B * K, rows, B, K, BLOCK_K)
    dp = (d * v * gate * (1 - 0.5 * gate)).to(dtype)
    tl.store(d_p + step * B * W + place, dp, mask=inside)
    part = own_parts + (block * LAYERS + layer) * B * K
    tl.store(part + rows[:, None] * K + k[None, :], tl.dot(dp, tl.trans(u)), mask=narrow)
    if FIRST:
        # x̃ has no earlier round: its gradient goes to the layer below, or to the embedding.
        if layer == 0:
            tl.store(d_x + t * B * W + place, d * gate, mask=inside)
        else:
            at_over = over + (layer - 1) * B * H + rows[:, None] * H + units[None, :]
            tl.store(at_over, d * gate, mask=inside)
    else:
        tl.store(current + layer * B * W + place, d * gate, mask=inside)


@triton.jit(do_not_specialize=["tick"])
def backward_state(
    tick,
    products,  # [SPLITS, L, B, W] float32, of h̃
    current,  # [L, B, W] float32, of h̃
    parts,  # [blocks, L, B, K] float32: those of round 0's dz
    down,  # [L, K, W] of round 0
    d_z,  # [L, time, B, K] of round 0, written
    own,  # [L, B, H] float32: the gradient of h̃, for `backward_cell`, written
    time,
    B,
    H,
    W,
    K,
    blocks_0,
    blocks,
    LAYERS: tl.constexpr,
    SPLITS: tl.constexpr,
    FRESH: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Adds dz_0 D_0 to the gradient of h̃ of every layer's step."""
    layer = tl.program_id(2)
    t = time - 1 - (tick - (LAYERS - 1 - layer))
    if (t < 0) | (t >= time):
        return
    block = tl.program_id(1)
    units = block * BLOCK_U + tl.arange(0, BLOCK_U)
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside = (rows[:, None] < B) & (units[None, :] < H)
    place = rows[:, None] * W + units[None, :]
    d = _incoming(
        products, current, layer, place, inside, B * W, LAYERS, SPLITS, FRESH, BLOCK_B, BLOCK_U
    )
    count = tl.where(layer == 0, blocks_0, blocks)
    dz = sum_parts(parts, count, layer, rows, B, K, LAYERS, BLOCK_B, BLOCK_K)
    read = dz.to(down.dtype.element_ty)
    d += _through_down(read, down + layer * K * W, units, H, W, K, BLOCK_K)
    if block == 0:
        _keep(dz, d_z + (layer * time + t) * B * K, rows, B, K, BLOCK_K)
    tl.store(own + layer * B * H + rows[:, None] * H + units[None, :], d, mask=inside)
