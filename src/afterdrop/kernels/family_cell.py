"""One time step of one layer for many mask samples of a language model at once.

Rows are multipliers × windows × samples, samples innermost; masks are levels (`family_masks`).

Letters: M multipliers, W windows, K samples, H units (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.family_masks import LevelMask
from afterdrop.kernels.lstm_forward import sigmoid, tanh

_CELL = {"BLOCK_R": 4, "BLOCK_U": 256, "num_warps": 4}  # rows and units per program


@triton.jit(do_not_specialize=["group", "t"])
def _cell(
    gates,  # [rows, 4H] before bias and nonlinearity
    bias,  # [4, H] float32
    c,  # [rows, H] float32
    own,  # [rows, stride_own]: the dropped h that the next step reads, written
    over,  # [rows, stride_over] the next layer's dropped input, or features [M, W, time, K, H]
    total,  # [rows, H], the sum of layers so far
    plain,  # [M, W, time, K, H] the stack's output
    levels_s,  # [W · K, H] levels of the state's mask
    rates_s,
    levels_o,  # those of the mask of `over`
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
    columns = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)[None, :]
    within = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    m = tl.program_id(2)
    inside = (within < group) & (columns < H)
    row = m.to(tl.int64) * group + within
    # Every row reads the bias again, from the L1 cache: sharing it would need barriers.
    units = tl.broadcast_to(columns, (BLOCK_R, BLOCK_U))
    at = gates + row * 4 * H + units
    at_bias = bias + units
    at_c = c + row * H + units
    at_total = total + row * H + units
    # All loads come before all arithmetic, so that they overlap.
    j = tl.load(at, mask=inside, other=0.0)
    o = tl.load(at + H, mask=inside, other=0.0)
    f = tl.load(at + 2 * H, mask=inside, other=0.0)
    i = tl.load(at + 3 * H, mask=inside, other=0.0)
    c_old = tl.load(at_c, mask=inside, other=0.0)
    if SKIP and not FIRST:
        below = tl.load(at_total, mask=inside, other=0.0)
    if STATE:
        level_s = tl.load(levels_s + within * H + units, mask=inside, other=0)
        rate_s = tl.load(rates_s + m)
    if OVER:
        level_o = tl.load(levels_o + within * H + units, mask=inside, other=0)
        rate_o = tl.load(rates_o + m)
    j = tanh(j.to(tl.float32) + tl.load(at_bias, mask=inside, other=0.0))
    o = sigmoid(o.to(tl.float32) + tl.load(at_bias + H, mask=inside, other=0.0))
    f = sigmoid(f.to(tl.float32) + tl.load(at_bias + 2 * H, mask=inside, other=0.0))
    i = sigmoid(i.to(tl.float32) + tl.load(at_bias + 3 * H, mask=inside, other=0.0))
    g = i
    if CAPPED:
        g = tl.minimum(1 - f, i, propagate_nan=tl.PropagateNan.ALL)
    c_new = f * c_old + g * j
    tl.store(at_c, c_new, mask=inside)
    h = o * tanh(c_new)
    kept = h
    if STATE:
        kept = tl.where(m < level_s.to(tl.int32), h * (1 / (1 - rate_s)), 0.0)
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
        read = tl.where(m < level_o.to(tl.int32), read * (1 / (1 - rate_o)), 0.0)
    tl.store(over + place * stride_over + units, read.to(over.dtype.element_ty), mask=inside)


def cell(
    gates: Tensor,
    bias: Tensor,
    c: Tensor,
    own: Tensor,
    over: Tensor,
    total: Tensor,
    plain: Tensor,
    masks: tuple[LevelMask | None, LevelMask | None],
    samples: int,
    multipliers: int,
    step: tuple[int, int],
    form: tuple[bool, bool, bool, bool],
) -> None:
    """One step of one layer for all rows; see `_cell` for what is read and written.

    Args:
        gates: Products of inputs and weights, without the bias.
        bias: Bias of the gates.
        c: Cell states, updated.
        own: The layer's own input of the next step, written.
        over: The next layer's input, or the features if this is the last layer, written.
        total: Sum of the layers so far, updated.
        plain: The stack's output, written by the last layer.
        masks: Masks of the next step's state and of `over`; None drops nothing.
        samples: K.
        multipliers: M.
        step: The time step and the number of time steps.
        form: Whether the input gate is capped, whether layers are summed, whether this is the first
            layer, and whether it is the last.
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
