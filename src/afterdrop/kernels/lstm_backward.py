"""The gradient of `lstm_forward`, tick by tick from the end of the window.

Layer l works on t = time − 1 − (tick − (L − 1 − l)), so that what it needs from its own next step
and from the layer above was written one tick earlier. There are two kernels per tick:

    products   parts = d_gates of (own layer, t + 1) · U  and  of (layer above, t) · W, each split
               along its length of 4H, so that there are enough programs
    cell       dh = output mask · dy + state mask · first + inter-layer mask · second, and from it
               d_gates (equations in `models.recurrence_gradient`)

Letters as in `lstm_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.lstm_forward import tanh


@triton.jit(do_not_specialize=["tick"])
def backward_products(
    tick,
    d_gates,  # [L, time, B, 4H]
    w_x,  # [L, 4, H, X]
    w_h,  # [L, 4, H, H]
    parts,  # [2, SPLITS, L, B, H] float32
    time,
    B,
    H,
    X,
    LAYERS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One split of one of the two products that are the gradient of a layer's h."""
    layer = tl.program_id(1) // 2
    above = tl.program_id(1) % 2
    split = tl.program_id(2)
    t = time - 1 - (tick - (LAYERS - 1 - layer))
    if (t < 0) | (t >= time):
        return
    if above == 1:
        if layer == LAYERS - 1:
            return
        source = ((layer + 1) * time + t) * B * 4 * H
        weight = w_x + (layer + 1) * 4 * H * X
        stride = X
    else:
        if t == time - 1:
            return
        source = (layer * time + t + 1) * B * 4 * H
        weight = w_h + layer * 4 * H * H
        stride = H
    blocks = tl.cdiv(H, BLOCK_N)
    columns = (tl.program_id(0) % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = (tl.program_id(0) // blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    share = tl.cdiv(4 * H, SPLITS * BLOCK_K) * BLOCK_K
    total = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for start in range(split * share, tl.minimum((split + 1) * share, 4 * H), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        d = tl.load(
            d_gates + source + rows[:, None] * 4 * H + k[None, :],
            mask=(rows[:, None] < B) & (k[None, :] < 4 * H),
            other=0.0,
        )
        w = tl.load(
            weight + k[:, None] * stride + columns[None, :],
            mask=(k[:, None] < 4 * H) & (columns[None, :] < H),
            other=0.0,
        )
        total = tl.dot(d, w, total)
    at = ((above * SPLITS + split) * LAYERS + layer) * B * H
    inside = (rows[:, None] < B) & (columns[None, :] < H)
    tl.store(parts + at + rows[:, None] * H + columns[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["tick"])
def backward_cell(
    tick,
    parts,  # [2, SPLITS, L, B, H] float32
    dy,  # [time, B, H] float32 gradient of the stack's dropped output
    dc,  # [L, B, H] float32, carried from tick to tick, initially 0
    c,  # [L, time + 1, B, H] float32
    gates,  # [L, time, B, 4, H]
    d_gates,  # [L, time, B, 4, H], written
    state_mask,
    inter_mask,
    out_mask,  # [time or 1, B, H] mask of the stack's output
    time,
    B,
    H,
    LAYERS: tl.constexpr,
    SPLITS: tl.constexpr,
    CAPPED: tl.constexpr,
    SKIP: tl.constexpr,
    STATE: tl.constexpr,
    INTER: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of the gates of every layer's step."""
    layer = tl.program_id(1)
    t = time - 1 - (tick - (LAYERS - 1 - layer))
    if (t < 0) | (t >= time):
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = B * H
    real = place < count
    row = place // H
    unit = place % H
    # Empty masks instead of branches for what does not exist, so that all loads overlap.
    from_out = real
    if not SKIP:
        from_out = place < tl.where(layer == LAYERS - 1, count, 0)
    from_own = place < tl.where(t < time - 1, count, 0)
    from_over = place < tl.where(layer < LAYERS - 1, count, 0)
    dh = tl.load(dy + t * count + place, mask=from_out, other=0.0)
    if OUT > 0:
        step = t if OUT == 2 else 0
        dh *= tl.load(out_mask + step * count + place, mask=from_out, other=0.0)
    own = tl.zeros((BLOCK,), tl.float32)
    over = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * LAYERS + layer) * count
        own += tl.load(parts + at + place, mask=from_own, other=0.0)
        at += SPLITS * LAYERS * count
        over += tl.load(parts + at + place, mask=from_over, other=0.0)
    if STATE > 0:
        step = (layer * time + t + 1) if STATE == 2 else layer
        own *= tl.load(state_mask + step * count + place, mask=from_own, other=0.0)
    if INTER > 0:
        step = (layer * time + t) if INTER == 2 else layer
        over *= tl.load(inter_mask + step * count + place, mask=from_over, other=0.0)
    dh += own + over
    at_gates = (layer * time + t) * B * 4 * H + row * 4 * H + unit
    j = tl.load(gates + at_gates, mask=real, other=0.0).to(tl.float32)
    o = tl.load(gates + at_gates + H, mask=real, other=0.0).to(tl.float32)
    f = tl.load(gates + at_gates + 2 * H, mask=real, other=0.0).to(tl.float32)
    i = tl.load(gates + at_gates + 3 * H, mask=real, other=0.0).to(tl.float32)
    at_c = c + (layer * (time + 1) + t) * B * H + place
    before = tl.load(at_c, mask=real, other=0.0)
    squashed = tanh(tl.load(at_c + B * H, mask=real, other=0.0))
    at_dc = dc + layer * B * H + place
    d = tl.load(at_dc, mask=real, other=0.0) + dh * o * (1 - squashed * squashed)
    g = i
    to_f = before
    to_i = j
    if CAPPED:
        capped = 1 - f <= i
        g = tl.minimum(1 - f, i)
        to_f = tl.where(capped, before - j, before)
        to_i = tl.where(capped, 0.0, j)
    dtype = d_gates.dtype.element_ty
    tl.store(d_gates + at_gates, (d * g * (1 - j * j)).to(dtype), mask=real)
    tl.store(d_gates + at_gates + H, (dh * squashed * o * (1 - o)).to(dtype), mask=real)
    tl.store(d_gates + at_gates + 2 * H, (d * to_f * f * (1 - f)).to(dtype), mask=real)
    tl.store(d_gates + at_gates + 3 * H, (d * to_i * i * (1 - i)).to(dtype), mask=real)
    tl.store(at_dc, d * f, mask=real)
