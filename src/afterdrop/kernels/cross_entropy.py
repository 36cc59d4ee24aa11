"""Cross entropy of logits and its gradient in one kernel, a program a row.

Letters: R rows, V classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels import log_sum_exp
from afterdrop.kernels.bases import LOG2E

_ROWS = {"BLOCK": 2048, "GROUP": 8, "num_warps": 8}


@triton.jit
def _gradient(x, lse, v, target, scale):
    """(p − 1 at the target) · scale of logits."""
    p = tl.exp2(x * LOG2E - lse * LOG2E)
    return (p - tl.where(v == target, 1.0, 0.0)) * scale


@triton.jit
def _rows(
    logits,  # [R, stride] float32
    bias,  # [V] float32
    targets,  # [R] int64
    loss,  # [R] float32
    gradient,  # [R, stride]
    V,
    stride,
    scale,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    to = gradient + row * stride
    dtype = gradient.dtype.element_ty
    first = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peak, total = log_sum_exp.begin(BLOCK // GROUP)
    v = first
    for _ in range(V // BLOCK):  # without masks, so that loads are as wide as they can be
        x = tl.load(at + v) + tl.load(bias + v)
        peak, total = log_sum_exp.more(x, peak, total)
        v += BLOCK
    inside = v < V
    last = tl.load(at + v, mask=inside, other=float("-inf"))
    last += tl.load(bias + v, mask=inside, other=0.0)
    peak, total = log_sum_exp.more(last, peak, total)
    lse = log_sum_exp.end(peak, total)
    target = tl.load(targets + row).to(tl.int32)
    tl.store(loss + row, lse - tl.load(at + target) - tl.load(bias + target))
    tl.store(to + v, _gradient(last, lse, v, target, scale).to(dtype), mask=inside)
    v = first
    for _ in range(V // BLOCK):
        x = tl.load(at + v) + tl.load(bias + v)
        tl.store(to + v, _gradient(x, lse, v, target, scale).to(dtype))
        v += BLOCK


def cross_entropy(
    logits: Tensor, bias: Tensor, targets: Tensor, loss: Tensor, gradient: Tensor, scale: float
) -> None:
    """Losses [R] of logits + bias, and their gradient times `scale`.

    Args:
        logits: [R, V₊] float32; columns from V on are not read.
        bias: [V].
        targets: [R].
        loss: [R], written.
        gradient: [R, V₊] of any type, its first V columns written.
        scale: Factor of the gradient.
    """
    assert logits.dtype == torch.float32 and logits.stride(1) == gradient.stride(1) == 1
    assert logits.stride(0) == gradient.stride(0)
    _rows[(len(logits),)](
        logits,
        bias,
        targets,
        loss,
        gradient,
        len(bias),
        logits.stride(0),
        scale,
        **_ROWS,
    )
