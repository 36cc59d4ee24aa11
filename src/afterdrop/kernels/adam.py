"""The optimiser's step: sums of squares, the factors they give, then clip, Adam and copy.

    g ← g + l2 Θ          g ← g · min(1, max_norm / ‖g‖)          v ← β2 v + (1 − β2) g²
    Θ ← Θ − lr √(1 − β2ᵗ) g / (√v + ε)                            as `train.optimiser.AdamTF`

Gradients lie in padded matrices and the 16-bit copy of a weight goes into another, so a parameter
[groups · rows, columns] is read and written through two layouts. A table has the addresses of all
parts of rows, in each of them; a program updates one, or sums the squares of a few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # columns of a piece
_PIECES = 2  # of a program that sums squares
_SETTLE = 4096
_KINDS = (None, torch.float32, torch.float16, torch.bfloat16)  # of copies; None: there is none


@triton.jit
def _gradient(pieces, number, l2, BLOCK: tl.constexpr):
    """G + l2 Θ of a piece, Θ, where it is, and which lanes are inside."""
    piece = pieces + number * 8
    lane = tl.arange(0, BLOCK)
    length, is_half = tl.load(piece + 5), tl.load(piece + 7)
    inside = lane < length
    parameter = tl.load(piece).to(tl.pointer_type(tl.float32)) + lane
    address, step = tl.load(piece + 1), lane * tl.load(piece + 4)
    theta = tl.load(parameter, mask=inside, other=0.0)
    # Loads of both types, of which one loads nothing: a branch would have to be waited for.
    wide = address.to(tl.pointer_type(tl.float32)) + step
    g = tl.load(wide, mask=lane < length * (1 - is_half), other=0.0)
    half = address.to(tl.pointer_type(tl.bfloat16)) + step
    g += tl.load(half, mask=lane < length * is_half, other=0.0).to(tl.float32)
    return g + l2 * theta, theta, parameter, inside


@triton.jit
def _square_sums(pieces, sums, l2, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PIECES):
        g, _, _, _ = _gradient(pieces, tl.program_id(0) * PIECES + part, l2, BLOCK)
        total += g * g
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _settle(
    sums,
    count,
    numbers,  # float64: steps, learning rate, ln β2, max_norm
    factors,  # of the gradient, and the size of the step
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
        # A norm that is no number stays one, as in the plain form; a minimum would drop it.
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
    # From the end, where the sum of squares has just been: much of that is still in the cache.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    piece = pieces + number * 8
    lane = tl.arange(0, BLOCK)
    g, theta, parameter, inside = _gradient(pieces, number, l2, BLOCK)
    square = tl.load(piece + 2).to(tl.pointer_type(tl.float32)) + lane
    v = tl.load(square, mask=inside, other=0.0)
    # All loads before all stores, so that none waits for another.
    clip = tl.load(factors)
    size = tl.load(factors + 1)
    copy = tl.load(piece + 3)
    kind = tl.load(piece + 6)  # as in _KINDS
    g *= clip
    v = beta2 * v + (1 - beta2) * g * g
    tl.store(square, v, mask=inside)
    theta -= size * g / (tl.sqrt(v) + epsilon)
    tl.store(parameter, theta, mask=inside)
    if kind == 1:
        tl.store(copy.to(tl.pointer_type(tl.float32)) + lane, theta, mask=inside)
    if kind > 1:  # both types as bits, for one branch and one store
        half = theta.to(tl.float16).to(tl.int16, bitcast=True)
        brain = theta.to(tl.bfloat16).to(tl.int16, bitcast=True)
        bits = tl.where(kind == 2, half, brain)
        tl.store(copy.to(tl.pointer_type(tl.int16)) + lane, bits, mask=inside)


class Slot:
    """A parameter with its gradient, its squares and its padded copy.

    Args:
        parameter: [groups · rows, columns] or [groups · rows], contiguous float32.
        grad: The gradient, float32 or bfloat16 and padded: its element (group, row, column) is
            at (group · rows₊ + row) · stride + column.
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
        assert parameter.dtype == square.dtype == torch.float32
        assert grad.dtype in (torch.float32, torch.bfloat16)
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

    def pieces(self) -> Tensor:
        """Parts of rows [P, 8].

        Each has its addresses in parameter, gradient, square and copy, the gradient's step, its
        length, the kind of copy, and whether the gradient is bfloat16.
        """
        row, column = torch.meshgrid(
            torch.arange(self.count), torch.arange(0, self.columns, _BLOCK), indexing="ij"
        )
        group, within = row // self.rows, row % self.rows
        index = row * self.columns + column
        at = (group * self.rows_p + within) * self.stride + column * self.step
        copied, kind = torch.zeros_like(row), 0
        if self.copy is not None:
            kind = _KINDS.index(self.copy.dtype)
            at_copy = (group * self.copy_rows + within) * self.copy_stride + column
            copied = self.copy.data_ptr() + at_copy * self.copy.element_size()
        found = [
            self.parameter.data_ptr() + 4 * index,
            self.grad.data_ptr() + self.grad.element_size() * at,
            self.square.data_ptr() + 4 * index,
            copied,
            torch.full_like(row, self.step),
            self.columns - column,
            torch.full_like(row, kind),
            torch.full_like(row, self.grad.dtype == torch.bfloat16),
        ]
        return torch.stack(found, -1).flatten(0, 1)


class Adam:
    """Steps of all parameters, with nothing but device memory read and written.

    Args:
        groups: The parameters; squares of a group's gradients are summed together. All their
            tensors stay where they are.
        l2: Penalty.
        beta2: Decay of the squares.
        epsilon: Added to their root.
        max_norm: Clip, or None.

    Attributes:
        steps: Steps done, a float64 scalar on the device.
        learning_rate: The same of the learning rate.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Slot]],
        l2: float,
        beta2: float,
        epsilon: float,
        max_norm: float | None,
    ) -> None:
        self.slots = [slot for group in groups for slot in group]  # whose addresses are used
        self.l2, self.beta2, self.epsilon = l2, beta2, epsilon
        self._clips = max_norm is not None
        device = self.slots[0].parameter.device
        numbers = [0.0, 0.0, math.log(beta2) if beta2 else -math.inf, max_norm or 0.0]
        self._numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
        self.steps, self.learning_rate = self._numbers[0], self._numbers[1]
        self._factors = torch.ones(2, device=device)
        pieces = [_filled([slot.pieces() for slot in group]) for group in groups]
        self._pieces = torch.cat(pieces).to(device)
        self._sums = torch.zeros(len(self._pieces) // _PIECES, device=device)
        counts = [len(part) for part in pieces]
        self._parts = list(
            zip(self._pieces.split(counts), self._sums.split([n // _PIECES for n in counts]))
        )

    def sum_squares(self, group: int) -> None:
        """Sums the squares of a group's gradients as they are now; needed before each step."""
        if self._clips:
            pieces, sums = self._parts[group]
            _square_sums[(len(sums),)](pieces, sums, self.l2, PIECES=_PIECES, BLOCK=_BLOCK)

    def step(self) -> None:
        """One step along the gradients as they are now."""
        _settle[(1,)](
            self._sums,
            len(self._sums),
            self._numbers,
            self._factors,
            CLIP=self._clips,
            BLOCK=_SETTLE,
            num_warps=8,
        )
        _update[(len(self._pieces),)](
            self._pieces,
            self._factors,
            self.l2,
            self.beta2,
            self.epsilon,
            BLOCK=_BLOCK,
        )


def _filled(parts: list[Tensor]) -> Tensor:
    """Pieces one after another, and behind them some of no length, to fill the last program."""
    pieces = torch.cat(parts)
    return torch.cat([pieces, pieces.new_zeros(-len(pieces) % _PIECES, pieces.shape[1])])
