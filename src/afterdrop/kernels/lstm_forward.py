"""One tick of a whole LSTM stack: the next step of every layer, product and cell in one kernel.

Layer l works on time step t = tick − l, so that what it reads from the layer below and from its own
last step was written one tick earlier: L layers over a window take time + L − 1 launches.

A program handles BLOCK_U units of one layer and BLOCK_B rows. It multiplies [x̃, h̃] by the weights
of the four gates of its units, applies the cell (see `models.cell`), and writes c, the sum of
layers, and the two dropped copies of h that the next tick reads, in its own layer and in the one
above.

Letters: L layers, `time` steps, B rows, H hidden units padded to a multiple of 32, X inputs padded
to the widest layer; gates j, o, f, i.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.log_constants import LOG2E


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(−x)) by a reciprocal square root: a division takes four times as long."""
    root = tl.rsqrt(1 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def tanh(x):
    """(1 − e) / (1 + e) with e = exp(−2x), which is 0 at 0: padded units stay zero."""
    # By default a minimum drops NaN, and a broken weight would look like a value of −1.
    e = tl.minimum(tl.exp2(x * (-2 * LOG2E)), 1e30, propagate_nan=tl.PropagateNan.ALL)
    root = tl.rsqrt(1 + e)
    return (1 - e) * root * root


@triton.jit
def _sums(
    x,  # [B, X] at the time step
    h,  # [B, H]
    w_x,  # [4H, X] of the layer
    w_h,  # [4H, H]
    inputs,
    rows,
    columns,  # rows of W and U
    B,
    H,
    X,
    BLOCK_B: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x̃ Wᵀ + h̃ Uᵀ of some units, in one loop, so that loads also overlap between the products."""
    total = tl.zeros((BLOCK_B, COLUMNS), tl.float32)
    parts = tl.cdiv(inputs, BLOCK_K)
    for part in range(parts + tl.cdiv(H, BLOCK_K)):
        first = part < parts
        a = tl.where(first, x, h)
        w = tl.where(first, w_x, w_h)
        # With known multiples of 32 masks are uniform over a vector; else loads are 2 bytes wide.
        stride = tl.multiple_of(tl.where(first, X, H), 32)
        width = tl.multiple_of(tl.where(first, inputs, H), 32)
        k = tl.where(first, part, part - parts) * BLOCK_K + tl.arange(0, BLOCK_K)
        a_rows = tl.load(
            a + rows[:, None] * stride + k[None, :],
            mask=(rows[:, None] < B) & (k[None, :] < width),
            other=0.0,
        )
        w_columns = tl.load(
            w + columns[None, :] * stride + k[:, None], mask=k[:, None] < width, other=0.0
        )
        total = tl.dot(a_rows, w_columns, total)
    return total


@triton.jit
def _gates(total, BLOCK_B: tl.constexpr, BLOCK_U: tl.constexpr):
    """Splits sums [B, 4 · units] into the gates j, o, f, i, each [B, units]."""
    pairs = tl.permute(tl.reshape(total, (BLOCK_B, 2, 2, BLOCK_U)), (0, 3, 1, 2))
    even, odd = tl.split(pairs)
    j, f = tl.split(even)
    o, i = tl.split(odd)
    return j, o, f, i


@triton.jit
def _cell_inputs(
    at_c,
    at_out,
    state_mask,
    inter_mask,
    layer,
    t,
    time,
    count,  # B · H
    place,
    real,
    LAYERS: tl.constexpr,
    SKIP: tl.constexpr,
    STATE: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """What the cell reads besides the products: c, the sum of the layers below, and masks."""
    c_old = tl.load(at_c, mask=real, other=0.0)
    below = tl.zeros((BLOCK_B, BLOCK_U), tl.float32)
    if SKIP:
        below = tl.where(layer > 0, tl.load(at_out, mask=real, other=0.0), 0.0)
    state_kept = tl.full((BLOCK_B, BLOCK_U), 1.0, tl.float32)
    if STATE > 0:
        step = (layer * time + tl.minimum(t + 1, time - 1)) if STATE == 2 else layer
        state_kept = tl.load(state_mask + step * count + place, mask=real, other=0.0).to(tl.float32)
    inter_kept = tl.full((BLOCK_B, BLOCK_U), 1.0, tl.float32)
    if INTER > 0:
        under = tl.minimum(layer, LAYERS - 2)  # the last layer does not use it
        step = (under * time + t) if INTER == 2 else under
        inter_kept = tl.load(inter_mask + step * count + place, mask=real, other=0.0).to(tl.float32)
    return c_old, below, state_kept, inter_kept


@triton.jit(do_not_specialize=["tick"])
def forward_tick(
    tick,
    x,  # [L, time, B, X] dropped inputs; layer 0's is given, the others' are written
    h,  # [L, time + 1, B, H] dropped states; step 0's is given
    w_x,  # [L, 4, H, X]
    w_h,  # [L, 4, H, H]
    bias,  # [L, 4, H] float32
    c,  # [L, time + 1, B, H] float32; step 0's is given
    gates,  # [L, time, B, 4, H] after their nonlinearity
    out,  # [time, B, H] float32, the stack's output
    last,  # [L, B, H] float32, h after the window, not dropped
    state_mask,  # [L, time or 1, B, H]
    inter_mask,  # [L - 1, time or 1, B, H]
    time,
    B,
    H,
    X,
    inputs,  # padded inputs of the first layer
    ones,  # the unit whose h̃ is 1, so that the bias gradient is a column of dU; -1 without one
    LAYERS: tl.constexpr,
    CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
    KEEP: tl.constexpr,
    STATE: tl.constexpr,  # 0 without masks, 1 for one mask per window, 2 for one per step
    INTER: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,  # whether to load what the cell reads before the products
):
    """Advances every layer by one step."""
    # Row blocks vary fastest, so that programs which read the same weights run together.
    layer = tl.program_id(2)
    t = tick - layer
    if (t < 0) | (t >= time):
        return
    units = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    rows = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    place = rows[:, None] * H + units[None, :]
    real = rows[:, None] < B
    at_bias = bias + layer * 4 * H + units
    bias_j, bias_o = tl.load(at_bias), tl.load(at_bias + H)
    bias_f, bias_i = tl.load(at_bias + 2 * H), tl.load(at_bias + 3 * H)
    at_c = c + (layer * (time + 1) + t) * B * H + place
    at_out = out + t * B * H + place
    if EARLY:  # the products hide the latency of these loads
        c_old, below, state_kept, inter_kept = _cell_inputs(
            at_c,
            at_out,
            state_mask,
            inter_mask,
            layer,
            t,
            time,
            B * H,
            place,
            real,
            LAYERS,
            SKIP,
            STATE,
            INTER,
            BLOCK_B,
            BLOCK_U,
        )
    # One product for all four gates: its columns are BLOCK_U units of each.
    column = tl.arange(0, 4 * BLOCK_U)
    columns = (column // BLOCK_U) * H + tl.program_id(1) * BLOCK_U + column % BLOCK_U
    at_h = h + (layer * (time + 1) + t) * B * H
    total = _sums(
        x + (layer * time + t) * B * X,
        at_h,
        w_x + layer * 4 * H * X,
        w_h + layer * 4 * H * H,
        tl.where(layer == 0, inputs, H),
        rows,
        columns,
        B,
        H,
        X,
        BLOCK_B,
        4 * BLOCK_U,
        BLOCK_K,
    )
    if not EARLY:
        c_old, below, state_kept, inter_kept = _cell_inputs(
            at_c,
            at_out,
            state_mask,
            inter_mask,
            layer,
            t,
            time,
            B * H,
            place,
            real,
            LAYERS,
            SKIP,
            STATE,
            INTER,
            BLOCK_B,
            BLOCK_U,
        )
    j, o, f, i = _gates(total, BLOCK_B, BLOCK_U)
    j = tanh(j + bias_j[None, :])
    o = sigmoid(o + bias_o[None, :])
    f = sigmoid(f + bias_f[None, :])
    i = sigmoid(i + bias_i[None, :])
    g = i
    if CAPPED:
        g = tl.minimum(1 - f, i, propagate_nan=tl.PropagateNan.ALL)
    c_new = f * c_old + g * j
    h_new = o * tanh(c_new)
    tl.store(at_c + B * H, c_new, mask=real)
    if KEEP:
        at_gates = gates + (layer * time + t) * B * 4 * H + rows[:, None] * 4 * H + units[None, :]
        dtype = gates.dtype.element_ty
        tl.store(at_gates, j.to(dtype), mask=real)
        tl.store(at_gates + H, o.to(dtype), mask=real)
        tl.store(at_gates + 2 * H, f.to(dtype), mask=real)
        tl.store(at_gates + 3 * H, i.to(dtype), mask=real)
    if SKIP:
        tl.store(at_out, below + h_new, mask=real)
    elif layer == LAYERS - 1:
        tl.store(at_out, h_new, mask=real)
    if t + 1 < time:
        kept = tl.where(units[None, :] == ones, 1.0, h_new * state_kept)
        tl.store(at_h + B * H + place, kept.to(h.dtype.element_ty), mask=real)
    else:
        tl.store(last + layer * B * H + place, h_new, mask=real)
    if layer + 1 < LAYERS:
        at_next = x + ((layer + 1) * time + t) * B * X + rows[:, None] * X + units[None, :]
        tl.store(at_next, (h_new * inter_kept).to(x.dtype.element_ty), mask=real)
