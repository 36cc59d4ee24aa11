"""The state at the start of a window: that after the last window, reset and dropped.

Letters as in `lstm_forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_window(
    last,  # [L, B, H] float32, not dropped
    c,  # [L, time + 1, B, H] float32: the last step is copied to step 0
    kept,  # [kept_rows], 0 where a row starts from zero; repeated for all B rows
    state_mask,  # [L, time or 1, B, H]
    h,  # [L, time + 1, B, H] dropped; step 0's is written
    dc,  # [L, B, H] float32, zeroed for the backward pass
    time,
    B,
    H,
    kept_rows,
    ones,  # the unit whose h̃ is 1; -1 without one
    RESETS: tl.constexpr,
    STATE: tl.constexpr,  # 0 without masks, 1 for one mask per window, 2 for one per step
    BLOCK: tl.constexpr,
):
    """Writes h̃ and c of step 0."""
    layer = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < B * H
    state = tl.load(last + layer * B * H + place, mask=real, other=0.0)
    at_c = c + layer * (time + 1) * B * H + place
    cell = tl.load(at_c + time * B * H, mask=real, other=0.0)
    if RESETS:
        stays = tl.load(kept + place // H % kept_rows, mask=real, other=0.0) > 0
        state = tl.where(stays, state, 0.0)
        cell = tl.where(stays, cell, 0.0)
    if STATE > 0:
        step = layer * time if STATE == 2 else layer
        state *= tl.load(state_mask + step * B * H + place, mask=real, other=0.0)
    state = tl.where(place % H == ones, 1.0, state)
    at_h = h + layer * (time + 1) * B * H + place
    tl.store(at_h, state.to(h.dtype.element_ty), mask=real)
    tl.store(at_c, cell, mask=real)
    tl.store(dc + layer * B * H + place, tl.zeros((BLOCK,), tl.float32), mask=real)
