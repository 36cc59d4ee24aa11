"""Cross entropy of logits and its gradient, which overwrites them, in one kernel.

A program handles one row. Letters: R rows, V classes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels import log_sum_exp
from afterdrop.kernels.log_constants import LOG2E

# Blocks of classes; a thread loads a group of 8, which are 16 bytes of float16.
_ROWS = {"BLOCK": 2048, "GROUP": 8, "num_warps": 8}


@triton.jit
def gradient(x, lse, v, target, scale):
    """The gradient with respect to logits: (p − 1 at the target) · scale."""
    p = tl.exp2(x * LOG2E - lse * LOG2E)
    return (p - tl.where(v == target, 1.0, 0.0)) * scale


@triton.jit
def _rows(
    logits,  # [R, stride], overwritten by the gradient
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
    # Read before the sums, which synchronise the threads: after them others write here.
    target = tl.load(targets + row).to(tl.int32)
    own = tl.load(at + target).to(tl.float32) + tl.load(bias + target)
    first = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peak, total = log_sum_exp.begin(BLOCK // GROUP)
    v = first
    for _ in range(V // BLOCK):  # without masks, so that loads are wide
        x = tl.load(at + v).to(tl.float32) + tl.load(bias + v)
        peak, total = log_sum_exp.more(x, peak, total)
        v += BLOCK
    inside = v < V
    last = tl.load(at + v, mask=inside, other=float("-inf")).to(tl.float32)
    last += tl.load(bias + v, mask=inside, other=0.0)
    peak, total = log_sum_exp.more(last, peak, total)
    lse = log_sum_exp.end(peak, total)
    tl.store(loss + row, lse - own)
    tl.store(at + v, gradient(last, lse, v, target, scale).to(dtype), mask=inside)
    v = first
    for _ in range(V // BLOCK):
        x = tl.load(at + v).to(tl.float32) + tl.load(bias + v)
        tl.store(at + v, gradient(x, lse, v, target, scale).to(dtype))
        v += BLOCK


def cross_entropy(
    logits: Tensor, bias: Tensor, targets: Tensor, loss: Tensor, scale: float
) -> None:
    """Writes losses of logits + bias, and their gradient times `scale` over the logits.

    Args:
        logits: [R, V₊]; padding columns from V on are neither read nor written.
        bias: [V] float32.
        targets: [R].
        loss: [R] float32, written.
        scale: Factor of the gradient, so that float16 can hold small ones.
    """
    assert logits.stride(1) == 1
    _rows[(len(logits),)](logits, bias, targets, loss, len(bias), logits.stride(0), scale, **_ROWS)
