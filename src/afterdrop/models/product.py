"""Products with the weights of a layer, most of all with one that a window uses many times.

A matrix product on a CPU first copies the weight into blocks that suit its registers. With few
rows and a weight beyond the cache that copy costs a third of the product, so here it is made once
a window, by the oneDNN operators that torch's own compiler uses. Everywhere else (other devices
and types, small weights, torch without oneDNN) the plain product is as fast and is what runs.

Letters: B rows (R for all rows of a window), N outputs, M inputs; a weight is [N, M].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Below 1 MB a weight stays in cache and packing gains nothing (AMD EPYC, AVX-512, 20 rows: even at
# 0.6 MB, 1.1 times faster at 1 MB, the packing included, and 1.35 times at 6.8 MB).
PACK_FROM_ELEMENTS = 2**18
# With many rows oneDNN is 3 to 7 percent faster unpacked; small products do not repay its set-up.
LINEAR_FROM_ELEMENTS = 2**17

Accumulate = Callable[[Tensor, Tensor], Tensor]


def onednn_takes(weight: Tensor, from_elements: int) -> bool:
    """Whether oneDNN can multiply by the weight, and pays from this many elements on.

    Example:
        >>> onednn_takes(torch.zeros(10, 10), PACK_FROM_ELEMENTS)
        False
    """
    return (
        weight.numel() >= from_elements
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def linear(x_RM: Tensor, weight_NM: Tensor, bias_N: Tensor) -> Tensor:
    """The product x Wᵀ + b for many rows, outside autograd.

    Example:
        >>> linear(torch.ones(1, 2), torch.ones(3, 2), torch.ones(3))
        tensor([[3., 3., 3.]])
    """
    if onednn_takes(weight_NM, LINEAR_FROM_ELEMENTS):
        operator = torch.ops.mkldnn._linear_pointwise.default
        return operator(x_RM, weight_NM, bias_N, "none", [], "")
    return torch.addmm(bias_N, x_RM, weight_NM.t())


def accumulator(weight_NM: Tensor, batch: int) -> Accumulate:
    """A function of (sum [B, N], x [B, M]) that returns sum + x Wᵀ, perhaps in place of sum.

    Example:
        >>> add = accumulator(torch.ones(3, 2), batch=1)
        >>> add(torch.ones(1, 3), torch.ones(1, 2))
        tensor([[3., 3., 3.]])
    """
    if onednn_takes(weight_NM, PACK_FROM_ELEMENTS):
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight_NM, batch)
        operator = torch.ops.mkldnn._linear_pointwise.binary

        def add(sum_BN: Tensor, x_BM: Tensor) -> Tensor:
            return operator(x_BM, sum_BN, packed, None, "add")
    else:
        weight_MN = weight_NM.t()

        def add(sum_BN: Tensor, x_BM: Tensor) -> Tensor:
            return sum_BN.addmm_(x_BM, weight_MN)

    return add


def row_product(weight_NM: Tensor, batch: int) -> Callable[[Tensor], Tensor]:
    """A function of d [B, N] that returns d W [B, M], always a new tensor.

    Example:
        >>> multiply = row_product(torch.ones(3, 2), batch=1)
        >>> multiply(torch.ones(1, 3))
        tensor([[3., 3.]])
    """
    if onednn_takes(weight_NM, PACK_FROM_ELEMENTS):
        # oneDNN packs a strided weight far more slowly than it is copied.
        weight_MN = weight_NM.t().contiguous()
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight_MN, batch)
        operator = torch.ops.mkldnn._linear_pointwise.default

        def multiply(d_BN: Tensor) -> Tensor:
            return operator(d_BN, packed, None, "none", [], "")
    else:

        def multiply(d_BN: Tensor) -> Tensor:
            return d_BN @ weight_NM

    return multiply
