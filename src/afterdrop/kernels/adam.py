"""One optimiser step: sums of squares, the factors that follow from them, clipping, Adam, copies.

    g ← g + l2 Θ          g ← g · min(1, max_norm / ‖g‖)          v ← β2 v + (1 − β2) g²
    Θ ← Θ − lr √(1 − β2ᵗ) g / (√v + ε)                            as `train.optimiser.AdamTF`

Gradients lie in padded matrices, and the 16-bit copy of a weight is written to another padded
matrix. A program handles one piece of a parameter, a run of consecutive elements, and a table holds
the position of each piece in both matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # elements per piece: 8 per thread, loaded 16 bytes at a time
_WARPS = 8
_SUMS_AT_ONCE = 16384  # sums of squares read at once by the one program that adds them
_KINDS = (None, torch.float32, torch.float16, torch.bfloat16)  # dtypes of copies, None without one
_FIELDS: tl.constexpr = tl.constexpr(16)  # fields per piece, see `Slot.pieces`


@triton.jit
def _places(piece, lane):
    """Rows and groups of rows between the first element and each element, and their columns."""
    x = (tl.load(piece + 6).to(tl.int32) + lane).to(tl.uint32)
    down = tl.umulhi(2 * x, tl.load(piece + 7).to(tl.uint32)).to(tl.int32)
    column = x.to(tl.int32) - down * tl.load(piece + 5).to(tl.int32)
    y = (tl.load(piece + 8).to(tl.int32) + down).to(tl.uint32)
    over = tl.umulhi(2 * y, tl.load(piece + 9).to(tl.uint32)).to(tl.int32)
    return down, over, column


@triton.jit
def _gradient(pieces, number, l2, BLOCK: tl.constexpr):
    """Gradient with penalty, g + l2 Θ, of a piece, Θ, and the places of its elements."""
    piece = pieces + number * _FIELDS
    lane = tl.arange(0, BLOCK)
    length, is_half = tl.load(piece + 4).to(tl.int32), tl.load(piece + 15).to(tl.int32)
    parameter = tl.load(piece).to(tl.pointer_type(tl.float32))
    theta = tl.load(parameter + lane, mask=lane < length, other=0.0)
    down, over, column = _places(piece, lane)
    at = down * tl.load(piece + 10).to(tl.int32) + over * tl.load(piece + 11).to(tl.int32) + column
    # Both dtypes are loaded, one of them with an empty mask: a branch would stall the loads.
    address = tl.load(piece + 2)
    wide = address.to(tl.pointer_type(tl.float32)) + at
    g = tl.load(wide, mask=lane < length * (1 - is_half), other=0.0)
    half = address.to(tl.pointer_type(tl.bfloat16)) + at
    g += tl.load(half, mask=lane < length * is_half, other=0.0).to(tl.float32)
    return g + l2 * theta, theta, down, over, column


@triton.jit
def _square_sums(pieces, sums, l2, BLOCK: tl.constexpr):
    g, _, _, _, _ = _gradient(pieces, tl.program_id(0), l2, BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _set_factors(
    sums,
    count,
    numbers,  # float64: steps, learning rate, ln β2, max_norm
    factors,  # factor of the gradient, and step size
    CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    step = tl.load(numbers) + 1
    tl.store(numbers, step)
    if CLIP:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total += tl.load(sums + at, mask=at < count, other=0.0).to(tl.float64)
        clip = tl.load(numbers + 3) / (tl.sqrt(tl.sum(total, 0)) + 1e-6)
        # A norm of NaN stays NaN, as in the plain form; a minimum would drop it.
        tl.store(factors, tl.where(clip > 1, 1.0, clip).to(tl.float32))
    size = tl.load(numbers + 1) * tl.sqrt(1 - tl.exp(step * tl.load(numbers + 2)))
    tl.store(factors + 1, size.to(tl.float32))


@triton.jit
def _update(
    pieces,
    factors,
    l2,
    beta2,
    epsilon,
    BLOCK: tl.constexpr,
):
    # In reverse order: the pieces that the sum of squares read last are still in the cache.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    piece = pieces + number * _FIELDS
    lane = tl.arange(0, BLOCK)
    inside = lane < tl.load(piece + 4).to(tl.int32)
    square = tl.load(piece + 1).to(tl.pointer_type(tl.float32)) + lane
    v = tl.load(square, mask=inside, other=0.0)
    g, theta, down, over, column = _gradient(pieces, number, l2, BLOCK)
    # All loads come before all stores, so that they overlap.
    clip = tl.load(factors)
    size = tl.load(factors + 1)
    copy = tl.load(piece + 3)
    at = down * tl.load(piece + 12).to(tl.int32) + over * tl.load(piece + 13).to(tl.int32) + column
    kind = tl.load(piece + 14)  # index into _KINDS
    g *= clip
    v = beta2 * v + (1 - beta2) * g * g
    tl.store(square, v, mask=inside)
    theta -= size * g / (tl.sqrt(v) + epsilon)
    tl.store(tl.load(piece).to(tl.pointer_type(tl.float32)) + lane, theta, mask=inside)
    if kind == 1:
        tl.store(copy.to(tl.pointer_type(tl.float32)) + at, theta, mask=inside)
    if kind > 1:  # both 16-bit dtypes as bits, for one branch and one store
        half = theta.to(tl.float16).to(tl.int16, bitcast=True)
        brain = theta.to(tl.bfloat16).to(tl.int16, bitcast=True)
        bits = tl.where(kind == 2, half, brain)
        tl.store(copy.to(tl.pointer_type(tl.int16)) + at, bits, mask=inside)


class Slot:
    """A parameter with its gradient, its running squares and its padded copy.

    Args:
        parameter: [groups · rows, columns] or [groups · rows], contiguous float32.
        grad: The gradient [groups · rows₊, columns₊] or [groups · rows₊], float32 or bfloat16, with
            any stride between rows.
        square: The optimiser's state, shaped as the parameter.
        copy: The padded copy, with as many dimensions as the gradient, or None.
        groups: Number of groups of rows, such as gates.
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
        assert parameter.dtype == square.dtype == torch.float32
        assert grad.dtype in (torch.float32, torch.bfloat16)
        for padded in (grad, grad if copy is None else copy):
            assert padded.dim() == parameter.dim() and len(padded) % groups == 0
            assert padded.dim() == 1 or padded.stride(1) == 1
        self.parameter, self.grad, self.square, self.copy = parameter, grad, square, copy
        self.groups, self.rows = groups, len(parameter) // groups
        self.columns = parameter.numel() // len(parameter)  # 1 for a vector

    def pieces(self, block: int) -> Tensor:
        """The pieces of the parameter [pieces, 16], of `block` elements each.

        Fields: address of the first element in the parameter (0) and in the squares (1), address of
        its row in the gradient (2) and in the copy (3); length of the piece (4); columns (5),
        column of the first element (6), multiplier that divides by columns (7), row of the first
        element in its group (8), multiplier that divides by the rows of a group (9); row stride of
        the gradient (10) and padding between its groups (11), the same of the copy (12, 13); dtype
        of the copy (14), and whether the gradient is bfloat16 (15).
        """
        first = torch.arange(0, self.parameter.numel(), block)
        row, column = first // self.columns, first % self.columns
        group, within = row // self.rows, row % self.rows

        def padded(tensor: Tensor) -> tuple[Tensor, int, int]:
            """The address of the first row, the row stride, and the padding between groups."""
            stride, rows = tensor.stride(0), len(tensor) // self.groups
            at = (group * rows + within) * stride
            return (
                tensor.data_ptr() + at * tensor.element_size(),
                stride,
                (rows - self.rows) * stride,
            )

        kind = 0 if self.copy is None else _KINDS.index(self.copy.dtype)
        gradient, *in_gradient = padded(self.grad)
        copy, *in_copy = padded(self.grad if self.copy is None else self.copy)
        fields = [
            self.parameter.data_ptr() + 4 * first,
            self.square.data_ptr() + 4 * first,
            gradient,
            copy,
            (self.parameter.numel() - first).clamp_max(block),
            self.columns,
            column,
            _divider(self.columns, block),
            within,
            _divider(self.rows, block) if self.groups > 1 else 0,
            *in_gradient,
            *in_copy,
            kind,
            int(self.grad.dtype == torch.bfloat16),
        ]
        return torch.stack([torch.as_tensor(field).expand_as(first) for field in fields], -1)


def _divider(size: int, block: int) -> int:
    """The multiplier that turns numbers below size + block into 2^31 times their quotient."""
    assert (size + block) * size < 2**31
    return -(-(2**31) // size)


class Adam:
    """Steps of all parameters that read and write nothing but device memory.

    Args:
        groups: The parameters; the squares of one group's gradients are summed in one launch. The
            tensors must keep their addresses.
        l2: Factor of the penalty's gradient.
        beta2: Decay of the running squares.
        epsilon: Added to their root.
        max_norm: Norm to clip the gradient at, or None.
        block: Elements per piece.
        sums_at_once: Sums of squares that are read at once.

    Attributes:
        steps: Steps done, a float64 scalar on the device.
        learning_rate: The learning rate, a float64 scalar on the device.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Slot]],
        l2: float,
        beta2: float,
        epsilon: float,
        max_norm: float | None,
        *,
        block: int = _BLOCK,
        sums_at_once: int = _SUMS_AT_ONCE,
    ) -> None:
        self.slots = [slot for group in groups for slot in group]  # keeps their memory alive
        self._block, self._sums_at_once = block, sums_at_once
        self.l2, self.beta2, self.epsilon = l2, beta2, epsilon
        self._clips = max_norm is not None
        device = self.slots[0].parameter.device
        numbers = [0.0, 0.0, math.log(beta2) if beta2 else -math.inf, max_norm or 0.0]
        self._numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.steps, self.learning_rate = self._numbers[0], self._numbers[1]
        self._factors = torch.ones(2, device=device)
        pieces = [torch.cat([slot.pieces(block) for slot in group]) for group in groups]
        self._pieces = torch.cat(pieces).to(device)
        self._sums = torch.zeros(len(self._pieces), device=device)
        counts = [len(part) for part in pieces]
        self._parts = list(zip(self._pieces.split(counts), self._sums.split(counts)))

    def sum_squares(self, group: int) -> None:
        """Sums the squares of a group's current gradients; call it for each group before a step."""
        if self._clips:
            pieces, sums = self._parts[group]
            _square_sums[(len(sums),)](pieces, sums, self.l2, BLOCK=self._block, num_warps=_WARPS)

    def step(self) -> None:
        """One step along the current gradients."""
        _set_factors[(1,)](
            self._sums,
            len(self._sums),
            self._numbers,
            self._factors,
            CLIP=self._clips,
            BLOCK=self._sums_at_once,
            num_warps=16,
        )
        _update[(len(self._pieces),)](
            self._pieces,
            self._factors,
            self.l2,
            self.beta2,
            self.epsilon,
            BLOCK=self._block,
            num_warps=_WARPS,
        )
