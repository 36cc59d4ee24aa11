"""Products with the weights of a layer, in particular with one that a window uses many times.

A matrix product on a CPU first copies (packs) the weight into blocks that suit the registers. With
few rows and a weight larger than the cache, packing takes a third of the time of the product, so
here it is done once per window, by the oneDNN operators that torch's own compiler uses. Everywhere
else (other devices and dtypes, small weights, torch without oneDNN) the plain product is as fast,
and is used.

Legend: B rows (R for all rows of a window), O outputs, I inputs; a weight is [O, I].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Below 1 MB a weight stays in the cache and packing gains nothing (AMD EPYC, AVX-512, 20 rows,
# packing included: equally fast at 0.6 MB, 1.1 times faster at 1 MB, 1.35 times at 6.8 MB).
PACK_FROM_ELEMENTS = 2**18
# With many rows oneDNN is 3 to 7 % faster even unpacked; small products do not repay its set-up.
LINEAR_FROM_ELEMENTS = 2**17

Accumulate = Callable[[Tensor, Tensor], Tensor]


def onednn_takes(weight: Tensor, from_elements: int) -> bool:
    """Whether oneDNN can multiply by the weight, and the weight has at least this size.

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


def linear(
    x_RI: Tensor, weight_OI: Tensor, bias_O: Tensor, from_elements: int = LINEAR_FROM_ELEMENTS
) -> Tensor:
    """The product x Wᵀ + b for many rows, outside autograd.

    Example:
        >>> linear(torch.ones(1, 2), torch.ones(3, 2), torch.ones(3))
        tensor([[3., 3., 3.]])
    """
    if onednn_takes(weight_OI, from_elements):
        operator = torch.ops.mkldnn._linear_pointwise.default
        return operator(x_RI, weight_OI, bias_O, "none", [], "")
    return torch.addmm(bias_O, x_RI, weight_OI.t())


def accumulator(
    weight_OI: Tensor, batch: int, from_elements: int = PACK_FROM_ELEMENTS
) -> Accumulate:
    """A function of (sum [B, O], x [B, I]) that returns sum + x Wᵀ and may overwrite the sum.

    Example:
        >>> add = accumulator(torch.ones(3, 2), batch=1)
        >>> add(torch.ones(1, 3), torch.ones(1, 2))
        tensor([[3., 3., 3.]])
    """
    if onednn_takes(weight_OI, from_elements):
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight_OI, batch)
        operator = torch.ops.mkldnn._linear_pointwise.binary

        def add(sum_BO: Tensor, x_BI: Tensor) -> Tensor:
            return operator(x_BI, sum_BO, packed, None, "add")
    else:
        weight_IO = weight_OI.t()

        def add(sum_BO: Tensor, x_BI: Tensor) -> Tensor:
            return sum_BO.addmm_(x_BI, weight_IO)

    return add


def row_product(
    weight_OI: Tensor, batch: int, from_elements: int = PACK_FROM_ELEMENTS
) -> Callable[[Tensor], Tensor]:
    """A function of d [B, O] that returns d W [B, I], always as a new tensor.

    Example:
        >>> multiply = row_product(torch.ones(3, 2), batch=1)
        >>> multiply(torch.ones(1, 3))
        tensor([[3., 3.]])
    """
    if onednn_takes(weight_OI, from_elements):
        # oneDNN packs a strided weight far more slowly than torch copies it.
        weight_IO = weight_OI.t().contiguous()
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight_IO, batch)
        operator = torch.ops.mkldnn._linear_pointwise.default

        def multiply(d_BO: Tensor) -> Tensor:
            return operator(d_BO, packed, None, "none", [], "")
    else:

        def multiply(d_BO: Tensor) -> Tensor:
            return d_BO @ weight_OI

    return multiply
