"""A row's log-sum-exp in one pass: groups of classes each have a peak, and a sum relative to it.

A thread has whole groups and moves a group's sum to a new peak once a block, not once a class. With
the entropy of the row goes a second sum, in which every term has the weight of its own logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.log_constants import LN2, LOG2E

# A class that is none: far below the peak of none, but not −inf, whose weight would be no number.
NOTHING: tl.constexpr = tl.constexpr(-2e30)


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


@triton.jit
def weigh(x, peak, total, weighted):
    """Peaks and both sums after more classes [groups, some]; `NOTHING` counts nothing."""
    higher = tl.maximum(peak, tl.max(x, 1))
    below = x * LOG2E - (higher * LOG2E)[:, None]
    terms = tl.exp2(below)
    move = (peak - higher) * LOG2E
    factor = tl.exp2(move)
    weighted = (weighted + total * move) * factor + tl.sum(terms * below, 1)
    return higher, total * factor + tl.sum(terms, 1), weighted


@triton.jit
def end_weighed(peak, total, weighted):
    """The log-sum-exp and the entropy of all groups, which are the first dimension."""
    whole = tl.max(peak, 0)
    move = (peak - whole) * LOG2E
    factor = tl.exp2(move)
    weighted = tl.sum((weighted + total * move) * factor, 0)
    total = tl.sum(total * factor, 0)
    log = tl.log(total)
    return whole + log, log - weighted / total * LN2
