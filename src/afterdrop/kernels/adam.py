"""The optimiser's step in two kernels a parameter: the global norm, then clip, L2, Adam and copy.

    g ← g + l2 Θ          g ← g · min(1, max_norm / ‖g‖)          v ← β2 v + (1 − β2) g²
    Θ ← Θ − lr √(1 − β2ᵗ) g / (√v + ε)                            as `train.optimiser.AdamTF`

Gradients lie in padded matrices and the 16-bit copy of a weight goes into another, so a parameter
[groups · rows, columns] is read and written through two layouts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _gradient(parameter, grad, row, column, inside, columns, rows, rows_p, stride, step, l2):
    """G + l2 Θ of elements of a row, and Θ."""
    at = ((row // rows) * rows_p + row % rows).to(tl.int64) * stride + column * step
    theta = tl.load(parameter + row * columns + column, mask=inside, other=0.0)
    return tl.load(grad + at, mask=inside, other=0.0) + l2 * theta, theta


@triton.jit
def _square_sum(
    parameter, grad, sums, columns, rows, rows_p, stride, step, l2, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        g, _ = _gradient(
            parameter, grad, row, column, column < columns, columns, rows, rows_p, stride, step, l2
        )
        total += g * g
    tl.store(sums + row, tl.sum(total, 0))


@triton.jit
def _update(
    parameter,
    grad,
    square,
    copy,
    factors,
    columns,
    rows,
    rows_p,
    stride,
    step,
    copy_rows,
    copy_stride,
    l2,
    beta2,
    epsilon,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g, theta = _gradient(
        parameter, grad, row, column, inside, columns, rows, rows_p, stride, step, l2
    )
    g *= tl.load(factors)
    index = row * columns + column
    v = tl.load(square + index, mask=inside, other=0.0)
    v = beta2 * v + (1 - beta2) * g * g
    tl.store(square + index, v, mask=inside)
    theta -= tl.load(factors + 1) * g / (tl.sqrt(v) + epsilon)
    tl.store(parameter + index, theta, mask=inside)
    if COPY:
        at = ((row // rows) * copy_rows + row % rows).to(tl.int64) * copy_stride + column
        tl.store(copy + at, theta.to(copy.dtype.element_ty), mask=inside)


class Slot:
    """A parameter with its gradient, its squares and its padded copy.

    Args:
        parameter: [groups · rows, columns] or [groups · rows], contiguous float32.
        grad: The gradient, padded: its element (group, row, column) is at
            (group · rows₊ + row) · stride + column.
        square: The optimiser's state, like the parameter.
        copy: The padded copy of the same form, or None.
        groups: Groups of rows, such as gates.
    """

    def __init__(
        self,
        parameter: Tensor,
        grad: Tensor,
        square: Tensor,
        copy: Tensor | None = None,
        groups: int = 1,
    ) -> None:
        assert parameter.is_contiguous() and square.is_contiguous()
        self.parameter, self.grad, self.square, self.copy = parameter, grad, square, copy
        matrix = parameter.dim() == 2
        # A vector is read as one row a group, whose elements may lie apart in the gradient.
        self.count = parameter.shape[0] if matrix else groups
        self.columns = parameter.numel() // self.count
        self.rows = self.count // groups
        self.rows_p = grad.shape[0] // groups if matrix else 1
        self.step = 1 if matrix else grad.stride(0)
        self.stride = grad.stride(0) if matrix else grad.shape[0] // groups * grad.stride(0)
        self.copy_rows, self.copy_stride = 1, 0
        if copy is not None:
            self.copy_rows = copy.shape[0] // groups if matrix else 1
            self.copy_stride = copy.stride(0) if matrix else copy.shape[0] // groups


class Adam:
    """Steps of all parameters, with nothing but device memory read and written.

    Args:
        device: Where the parameters are.
        l2: Penalty.
        beta2: Decay of the squares.
        epsilon: Added to their root.
        max_norm: Clip, or None.
    """

    def __init__(
        self, device: torch.device, l2: float, beta2: float, epsilon: float, max_norm: float | None
    ) -> None:
        self.l2, self.beta2, self.epsilon, self.max_norm = l2, beta2, epsilon, max_norm
        self.learning_rate = torch.zeros((), dtype=torch.float64, device=device)
        self.steps = torch.zeros((), dtype=torch.float64, device=device)
        self._factors = torch.ones(2, device=device)

    def step(self, slots: list[Slot]) -> None:
        """One step along the gradients as they are now."""
        self.steps += 1
        if self.max_norm is not None:
            sums = torch.empty(sum(slot.count for slot in slots), device=self._factors.device)
            for slot, part in zip(slots, sums.split([slot.count for slot in slots])):
                self._norm(slot, part)
            norm = sums.double().sum().sqrt_()
            self._factors[0] = (self.max_norm / (norm + 1e-6)).clamp_(max=1.0)
        self._factors[1] = self.learning_rate * (1 - self.beta2**self.steps).sqrt_()
        for slot in slots:
            self._apply(slot)

    def _norm(self, slot: Slot, sums: Tensor) -> None:
        _square_sum[(slot.count,)](
            slot.parameter,
            slot.grad,
            sums,
            slot.columns,
            slot.rows,
            slot.rows_p,
            slot.stride,
            slot.step,
            self.l2,
            BLOCK=_BLOCK,
        )

    def _apply(self, slot: Slot) -> None:
        _update[(slot.count, -(-slot.columns // _BLOCK))](
            slot.parameter,
            slot.grad,
            slot.square,
            slot.parameter if slot.copy is None else slot.copy,
            self._factors,
            slot.columns,
            slot.rows,
            slot.rows_p,
            slot.stride,
            slot.step,
            slot.copy_rows,
            slot.copy_stride,
            self.l2,
            self.beta2,
            self.epsilon,
            COPY=slot.copy is not None,
            BLOCK=_BLOCK,
        )
