"""Log-sum-exp of a row in one pass, with a peak and a sum relative to it per group of classes.

A thread holds whole groups and moves the sum of a group to a new peak once per block, not once per
class. The entropy of the row needs a second sum, in which every term is weighted by its logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.log_constants import LN2, LOG2E

# A padding class: far below the initial peak, but not −inf, whose weighted term would be NaN.
NOTHING: tl.constexpr = tl.constexpr(-2e30)


@triton.jit
def begin(GROUPS: tl.constexpr):
    """Initial peaks and sums [groups]."""
    # Not −inf, whose difference from itself is NaN.
    return tl.full((GROUPS,), -1e30, tl.float32), tl.zeros((GROUPS,), tl.float32)


@triton.jit
def more(x, peak, total):
    """Peaks and sums after more classes x [groups, classes]; −inf adds nothing."""
    higher = tl.maximum(peak, tl.max(x, 1))
    terms = tl.exp2(x * LOG2E - (higher * LOG2E)[:, None])
    return higher, total * tl.exp2((peak - higher) * LOG2E) + tl.sum(terms, 1)


@triton.jit
def end(peak, total):
    """The log-sum-exp over all groups."""
    whole = tl.max(peak, 0)
    return whole + tl.log(tl.sum(total * tl.exp2((peak - whole) * LOG2E), 0))


@triton.jit
def weigh(x, peak, total, weighted):
    """Peaks and both sums after more classes x [groups, classes]; `NOTHING` adds nothing."""
    higher = tl.maximum(peak, tl.max(x, 1))
    below = x * LOG2E - (higher * LOG2E)[:, None]
    terms = tl.exp2(below)
    move = (peak - higher) * LOG2E
    factor = tl.exp2(move)
    weighted = (weighted + total * move) * factor + tl.sum(terms * below, 1)
    return higher, total * factor + tl.sum(terms, 1), weighted


@triton.jit
def end_weighed(peak, total, weighted):
    """The log-sum-exp and the entropy over all groups, the first dimension."""
    whole = tl.max(peak, 0)
    move = (peak - whole) * LOG2E
    factor = tl.exp2(move)
    weighted = tl.sum((weighted + total * move) * factor, 0)
    total = tl.sum(total * factor, 0)
    log = tl.log(total)
    return whole + log, log - weighted / total * LN2
