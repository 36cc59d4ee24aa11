"""A row's log-sum-exp in one pass: groups of classes each have a peak, and a sum relative to it.

A thread has whole groups and moves a group's sum to a new peak once a block, not once a class.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.bases import LOG2E


@triton.jit
def begin(GROUPS: tl.constexpr):
    """Peaks and sums of no class yet [groups]."""
    # Not -inf, whose difference from itself is no number.
    return tl.full((GROUPS,), -1e30, tl.float32), tl.zeros((GROUPS,), tl.float32)


@triton.jit
def more(x, peak, total):
    """Peaks and sums after more classes [groups, some]; -inf counts nothing."""
    higher = tl.maximum(peak, tl.max(x, 1))
    terms = tl.exp2(x * LOG2E - (higher * LOG2E)[:, None])
    return higher, total * tl.exp2((peak - higher) * LOG2E) + tl.sum(terms, 1)


@triton.jit
def end(peak, total):
    """The log-sum-exp of all groups."""
    whole = tl.max(peak, 0)
    return whole + tl.log(tl.sum(total * tl.exp2((peak - whole) * LOG2E), 0))
