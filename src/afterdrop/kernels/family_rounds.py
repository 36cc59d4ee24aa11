"""The gate of a Mogrifier round for many rows: v ← v · 2σ(p + b), in place.

Letters: R rows, W units of v (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.lstm_forward import sigmoid

_GATE = {"BLOCK_R": 4, "BLOCK_U": 256, "num_warps": 4}  # rows and units per program


@triton.jit
def _gate(
    v,  # [R, stride]
    p,  # [R, W] without the bias
    bias,  # [W] float32
    R,
    W,
    stride,
    BLOCK_R: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    units = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)[None, :]
    row = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R))[:, None]
    inside = (row < R) & (units < W)
    row = row.to(tl.int64)
    at_v = v + row * stride + units
    old = tl.load(at_v, mask=inside, other=0.0)
    sums = tl.load(p + row * W + units, mask=inside, other=0.0).to(tl.float32)
    gate = 2 * sigmoid(sums + tl.load(bias + units, mask=units < W, other=0.0))
    tl.store(at_v, (old.to(tl.float32) * gate).to(v.dtype.element_ty), mask=inside)


def gate_rows(v: Tensor, p: Tensor, bias: Tensor) -> None:
    """Gates the rows of v in place.

    Args:
        v: [R, W], with any stride between rows.
        p: [R, W] contiguous: the products of what the round reads, without the bias.
        bias: [W] float32.
    """
    assert v.shape == p.shape and v.stride(1) == 1 and p.is_contiguous()
    R, W = p.shape
    grid = -(-W // _GATE["BLOCK_U"]), -(-R // _GATE["BLOCK_R"])
    _gate[grid](v, p, bias, R, W, v.stride(0), **_GATE)
