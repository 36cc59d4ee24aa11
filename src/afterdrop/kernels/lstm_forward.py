"""One tick of a whole LSTM stack: every layer's next step at once, product and cell in one kernel.

Layer l works on time step t = tick − l, so that what it reads from the layer below and from its own
last step was written one tick earlier: L layers over a window take time + L − 1 launches.

A program has BLOCK_U + MORE units of one layer and BLOCK_B rows. It multiplies [x̃, h̃] by the four
gates' weights of its units, applies the cell (see `models.cell`), and writes c, the sum of layers,
and the two dropped copies of h that the next tick reads: into its own layer and the one above.

Letters: L layers, time steps, B rows, H hidden units padded to a multiple of 32, X inputs padded to
the widest layer; gates j, o, f, i.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """2 σ(2x) − 1, which is exact enough for 16-bit operands and needs no library."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _columns(first, H, BLOCK_U: tl.constexpr):
    """Rows of W of all four gates of BLOCK_U units from `first` on, gate by gate."""
    column = tl.arange(0, 4 * BLOCK_U)
    return (column // BLOCK_U) * H + tl.minimum(first + column % BLOCK_U, H - 1)


@triton.jit
def _add_products(
    total,
    more,
    a,
    w,
    width,
    rows,
    columns,
    columns_more,
    B,
    stride_a,
    stride_w,
    MORE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Adds a [B, width] times rows of w, to `total` and, if there are MORE units, to `more`."""
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < width
        a_BK = tl.load(
            a + rows[:, None] * stride_a + k[None, :],
            mask=(rows[:, None] < B) & inside[None, :],
            other=0.0,
        )
        at = w + columns[None, :] * stride_w + k[:, None]
        total = tl.dot(a_BK, tl.load(at, mask=inside[:, None], other=0.0), total)
        if MORE > 0:
            at = w + columns_more[None, :] * stride_w + k[:, None]
            more = tl.dot(a_BK, tl.load(at, mask=inside[:, None], other=0.0), more)
    return total, more


@triton.jit
def _gates(total, BLOCK_B: tl.constexpr, BLOCK_U: tl.constexpr):
    """The four gates j, o, f, i [B, U] of sums [B, 4U], gate by gate."""
    pairs = tl.permute(tl.reshape(total, (BLOCK_B, 2, 2, BLOCK_U)), (0, 3, 1, 2))
    even, odd = tl.split(pairs)
    j, f = tl.split(even)
    o, i = tl.split(odd)
    return j, o, f, i


@triton.jit
def _cell(
    total,
    layer,
    t,
    first,
    rows,
    x,
    h,
    bias,
    c,
    gates,
    out,
    last,
    state_mask,
    inter_mask,
    time,
    B,
    H,
    X,
    ones,
    LAYERS: tl.constexpr,
    CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
    KEEP: tl.constexpr,
    STATE: tl.constexpr,
    INTER: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """From the sums [B, 4U] of the gates of U units from `first` on to all that a tick writes."""
    units = first + tl.arange(0, BLOCK_U)
    j, o, f, i = _gates(total, BLOCK_B, BLOCK_U)
    at_bias = bias + layer * 4 * H + tl.minimum(units, H - 1)
    j = tanh(j + tl.load(at_bias)[None, :])
    o = tl.sigmoid(o + tl.load(at_bias + H)[None, :])
    f = tl.sigmoid(f + tl.load(at_bias + 2 * H)[None, :])
    i = tl.sigmoid(i + tl.load(at_bias + 3 * H)[None, :])
    g = i
    if CAPPED:
        g = tl.minimum(1 - f, i)
    place = rows[:, None] * H + units[None, :]
    real = (rows[:, None] < B) & (units[None, :] < H)
    at_c = c + (layer * (time + 1) + t) * B * H + place
    c_new = f * tl.load(at_c, mask=real, other=0.0) + g * j
    h_new = o * tanh(c_new)
    tl.store(at_c + B * H, c_new, mask=real)
    if KEEP:
        at_gates = gates + (layer * time + t) * B * 4 * H + rows[:, None] * 4 * H + units[None, :]
        dtype = gates.dtype.element_ty
        tl.store(at_gates, j.to(dtype), mask=real)
        tl.store(at_gates + H, o.to(dtype), mask=real)
        tl.store(at_gates + 2 * H, f.to(dtype), mask=real)
        tl.store(at_gates + 3 * H, i.to(dtype), mask=real)
    at_out = out + t * B * H + place
    if SKIP:
        y = h_new
        if layer > 0:
            y += tl.load(at_out, mask=real, other=0.0)
        tl.store(at_out, y, mask=real)
    elif layer == LAYERS - 1:
        tl.store(at_out, h_new, mask=real)
    kept = h_new
    if t + 1 < time:
        if STATE > 0:
            step = (layer * time + t + 1) if STATE == 2 else layer
            kept = h_new * tl.load(state_mask + step * B * H + place, mask=real, other=0.0)
        kept = tl.where(units[None, :] == ones, 1.0, kept)
        at_h = h + (layer * (time + 1) + t + 1) * B * H
        tl.store(at_h + place, kept.to(h.dtype.element_ty), mask=real)
    else:
        tl.store(last + layer * B * H + place, h_new, mask=real)
    if layer + 1 < LAYERS:
        read = h_new
        if INTER > 0:
            step = (layer * time + t) if INTER == 2 else layer
            read = h_new * tl.load(inter_mask + step * B * H + place, mask=real, other=0.0)
        at_next = x + ((layer + 1) * time + t) * B * X + rows[:, None] * X + units[None, :]
        tl.store(at_next, read.to(x.dtype.element_ty), mask=real)


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
    last,  # [L, B, H] float32, the undropped h after the window
    state_mask,  # [L, time or 1, B, H]
    inter_mask,  # [L - 1, time or 1, B, H]
    time,
    B,
    H,
    X,
    inputs,  # of the first layer, padded
    ones,  # the unit whose h̃ is 1, so that a bias gradient is a column of dU; -1 for none
    LAYERS: tl.constexpr,
    CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
    KEEP: tl.constexpr,
    STATE: tl.constexpr,  # 0 no mask, 1 one mask a window, 2 one a step
    INTER: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    MORE: tl.constexpr,  # units beyond BLOCK_U, so that one program a processor has all
    BLOCK_K: tl.constexpr,
):
    """Advances every layer by one step."""
    layer = tl.program_id(1)
    t = tick - layer
    if (t < 0) | (t >= time):
        return
    rows = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    # One product for all four gates: its columns are U units of each.
    first = tl.program_id(0) * (BLOCK_U + MORE)
    columns = _columns(first, H, BLOCK_U)
    total = tl.zeros((BLOCK_B, 4 * BLOCK_U), tl.float32)
    columns_more = columns
    more = total
    if MORE > 0:
        columns_more = _columns(first + BLOCK_U, H, MORE)
        more = tl.zeros((BLOCK_B, 4 * MORE), tl.float32)
    # Known multiples keep the masks of whole vectors whole, without which loads are 2 bytes wide.
    width = tl.multiple_of(tl.where(layer == 0, inputs, H), 32)
    at_x = x + (layer * time + t) * B * X
    at_h = h + (layer * (time + 1) + t) * B * H
    own_w_x, own_w_h = w_x + layer * 4 * H * X, w_h + layer * 4 * H * H
    total, more = _add_products(
        total, more, at_x, own_w_x, width, rows, columns, columns_more, B, X, X, MORE, BLOCK_K
    )
    total, more = _add_products(
        total, more, at_h, own_w_h, H, rows, columns, columns_more, B, H, H, MORE, BLOCK_K
    )
    _cell(
        total,
        layer,
        t,
        first,
        rows,
        x,
        h,
        bias,
        c,
        gates,
        out,
        last,
        state_mask,
        inter_mask,
        time,
        B,
        H,
        X,
        ones,
        LAYERS,
        CAPPED,
        SKIP,
        KEEP,
        STATE,
        INTER,
        BLOCK_B,
        BLOCK_U,
    )
    if MORE > 0:
        _cell(
            more,
            layer,
            t,
            first + BLOCK_U,
            rows,
            x,
            h,
            bias,
            c,
            gates,
            out,
            last,
            state_mask,
            inter_mask,
            time,
            B,
            H,
            X,
            ones,
            LAYERS,
            CAPPED,
            SKIP,
            KEEP,
            STATE,
            INTER,
            BLOCK_B,
            MORE,
        )
