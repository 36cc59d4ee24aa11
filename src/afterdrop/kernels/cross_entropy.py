"""Cross entropy of logits and its gradient in one kernel, a program a row.

Letters: R rows, V classes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


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
):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(at + v, mask=v < V, other=float("-inf"))
        x += tl.load(bias + v, mask=v < V, other=0.0)
        higher = tl.maximum(peak, x)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.exp(x - safe)
        peak = higher
    whole = tl.max(peak, 0)
    lse = whole + tl.log(tl.sum(total * tl.exp(peak - whole), 0))
    target = tl.load(targets + row)
    tl.store(loss + row, lse - tl.load(at + target) - tl.load(bias + target))
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(at + v, mask=v < V, other=float("-inf"))
        x += tl.load(bias + v, mask=v < V, other=0.0)
        d = (tl.exp(x - lse) - tl.where(v == target, 1.0, 0.0)) * scale
        tl.store(gradient + row * stride + v, d.to(gradient.dtype.element_ty), mask=v < V)


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
        BLOCK=_BLOCK,
        num_warps=8,
    )
