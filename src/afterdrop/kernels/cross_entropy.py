"""Cross entropy of logits, and its gradient in their place, in one kernel, a program a row.

Letters: R rows, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels import log_sum_exp
from afterdrop.kernels.log_constants import LOG2E

_ROWS = {"BLOCK": 2048, "GROUP": 8, "num_warps": 8}


@triton.jit
def _gradient(x, lse, v, target, scale):
    """(p − 1 at the target) · scale of logits."""
    p = tl.exp2(x * LOG2E - lse * LOG2E)
    return (p - tl.where(v == target, 1.0, 0.0)) * scale


@triton.jit
def _rows(
    logits,  # [R, stride], in whose place the gradient goes
    bias,  # [V] float32
    targets,  # [R] int64
    loss,  # [R] float32
    V,
    stride,
    scale,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    dtype = logits.dtype.element_ty
    # Before the sums, where all threads wait for each other: then others write here.
    target = tl.load(targets + row).to(tl.int32)
    own = tl.load(at + target).to(tl.float32) + tl.load(bias + target)
    first = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peak, total = log_sum_exp.begin(BLOCK // GROUP)
    v = first
    for _ in range(V // BLOCK):  # without masks, so that loads are as wide as they can be
        x = tl.load(at + v).to(tl.float32) + tl.load(bias + v)
        peak, total = log_sum_exp.more(x, peak, total)
        v += BLOCK
    inside = v < V
    last = tl.load(at + v, mask=inside, other=float("-inf")).to(tl.float32)
    last += tl.load(bias + v, mask=inside, other=0.0)
    peak, total = log_sum_exp.more(last, peak, total)
    lse = log_sum_exp.end(peak, total)
    tl.store(loss + row, lse - own)
    tl.store(at + v, _gradient(last, lse, v, target, scale).to(dtype), mask=inside)
    v = first
    for _ in range(V // BLOCK):
        x = tl.load(at + v).to(tl.float32) + tl.load(bias + v)
        tl.store(at + v, _gradient(x, lse, v, target, scale).to(dtype))
        v += BLOCK


def cross_entropy(
    logits: Tensor, bias: Tensor, targets: Tensor, loss: Tensor, scale: float
) -> None:
    """Losses [R] of logits + bias, and in the place of the logits their gradient times `scale`.

    Args:
        logits: [R, V₊]; columns from V on are neither read nor written.
        bias: [V] float32.
        targets: [R].
        loss: [R] float32, written.
        scale: Factor of the gradient, for a type that has few small numbers.
    """
    assert logits.stride(1) == 1
    _rows[(len(logits),)](logits, bias, targets, loss, len(bias), logits.stride(0), scale, **_ROWS)
