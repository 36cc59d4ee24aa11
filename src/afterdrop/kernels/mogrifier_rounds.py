"""The Mogrifier rounds of an LSTM stack: padded weights, buffers, and their launches in a tick.

Rounds gate the stack's x̃ and h̃ in place, so that its cells and the gradients of their weights read
what they would read without rounds.

Letters as in `mogrifier_forward`: R rounds, L layers, B rows, H hidden units, X inputs, K rank and
W = max(X, H) units, padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from afterdrop.kernels.mogrifier_backward import backward_round, backward_state, cell_products
from afterdrop.kernels.mogrifier_forward import first_parts, forward_round

LayerRounds = Sequence[tuple[tuple[Tensor, ...], Tensor]]  # (D_r, U_r) and b_r of each round
# Rows and units per program, by the largest number of rows of the batch. Every program reads the
# parts of all blocks of units: with many rows there are enough programs with few, large blocks.
_SIZES = {
    128: {"BLOCK_B": 16, "BLOCK_U": 64, "num_warps": 4},
    512: {"BLOCK_B": 32, "BLOCK_U": 128, "num_warps": 4},
    2**31: {"BLOCK_B": 64, "BLOCK_U": 256, "num_warps": 8},
}


class RoundWeights:
    """Padded copies of the weights of all rounds.

    Args:
        rounds: R.
        rank: That of the matrices.
        layers: L.
        width: W.
        padded_rank: K.
        like: A tensor of the dtype of the products, on the device.
    """

    def __init__(
        self, rounds: int, rank: int, layers: int, width: int, padded_rank: int, like: Tensor
    ) -> None:
        self.rank = rank
        self.down = like.new_zeros(rounds, layers, padded_rank, width)
        self.up = like.new_zeros(rounds, layers, width, padded_rank)
        self.bias = torch.zeros(rounds, layers, width, device=like.device)

    def pack(self, layers: Sequence[LayerRounds]) -> None:
        """Copies the weights of the rounds of each layer."""
        for at, rounds in enumerate(layers):
            for number, ((down, up), bias) in enumerate(rounds):
                self.down[number, at, : self.rank, : down.shape[1]].copy_(down)
                self.up[number, at, : len(up), : self.rank].copy_(up)
                self.bias[number, at, : len(bias)].copy_(bias)


class Rounds:
    """The rounds of a stack over windows of one size.

    Args:
        weights: The weights.
        x: [L, time, B, X] x̃ of the stack.
        h: [L, time + 1, B, H] h̃ of the stack.
        inputs: Padded units that enter the first layer.
        ones: The unit of h̃ that is 1, or -1.
        splits: Parts of a product of d_gates along its inner length.
        training: Whether to keep what `backward` needs.

    Attributes:
        parts: [2, 1, L, B, H] the gradients that `backward_cell` reads: of the layer's own h̃ at the
            next step, and of the x̃ of the layer above.
        d_x: [time, B, W] the gradient of the first layer's x̃.
    """

    def __init__(
        self,
        weights: RoundWeights,
        x: Tensor,
        h: Tensor,
        inputs: int,
        ones: int,
        splits: int,
        training: bool,
    ) -> None:
        self.weights, self.x, self.h = weights, x, h
        self.inputs, self.ones, self.splits, self.training = inputs, ones, splits, training
        R, L, K, W = weights.down.shape
        time, B, H = x.shape[1], x.shape[2], h.shape[-1]
        self.count, self.sizes = R, (time, B, H, W, K)
        size = next(size for most, size in _SIZES.items() if most >= B)
        rows, units = size["BLOCK_B"], size["BLOCK_U"]
        blocks = -(-W // units)
        device, kept = x.device, (R, L, time, B)
        self._parts = torch.zeros(2, blocks, L, B, K, device=device)
        self._blocks_h, self._blocks_x = -(-H // units), -(-inputs // units)
        self._grid = (-(-B // rows), blocks, L)
        self._blocks: dict[str, Any] = {
            "LAYERS": L,
            "BLOCK_K": max(16, triton.next_power_of_2(K)),
            **size,
        }
        wide = W if training else 1
        self.before = [x.new_zeros(L, time, B, v.shape[-1]) for v in self._gated() if training]
        self.z = x.new_zeros(*kept, K) if training else x.new_zeros(R, 1)
        self.d_p = x.new_zeros(*kept, W) if training else x.new_zeros(R, 1)
        self.d_z = torch.zeros_like(self.z)
        self._products = torch.zeros(2, splits, L, B, wide, device=device)
        self._current = torch.zeros(2, L, B, wide, device=device)
        self.parts = torch.zeros(2, 1, L, B, H, device=device)
        self.d_x = torch.zeros(time, B, wide, device=device)

    def _gated(self) -> list[Tensor]:
        """What each round gates."""
        return [self.h if number % 2 else self.x for number in range(self.count)]

    def _widths(self, number: int) -> tuple[int, int, int]:
        """The units that a round gates and the parts of its z, both in layer 0; parts elsewhere."""
        H = self.sizes[2]
        if number % 2:
            return H, self._blocks_x, self._blocks_h
        return self.inputs, self._blocks_h, self._blocks_h

    def forward(self, tick: int) -> None:
        """Gates x̃ and h̃ of the next step of every layer."""
        time, B, H, W, K = self.sizes
        weights, parts = self.weights, self._parts
        first_parts[self._grid](
            tick, self.h, weights.down[0], parts[0], time, B, H, W, K, **self._blocks
        )
        for number, v in enumerate(self._gated()):
            following = min(number + 1, self.count - 1)
            forward_round[self._grid](
                tick,
                v,
                self.before[number] if self.training else v,
                self.z[number],
                parts[number % 2],
                parts[(number + 1) % 2],
                weights.up[number],
                weights.bias[number],
                weights.down[following],
                time,
                B,
                H,
                W,
                K,
                v.shape[1],
                v.shape[-1],
                *self._widths(number),
                weights.rank,
                self.ones if number % 2 else -1,
                KEEP=self.training,
                LAST=number + 1 == self.count,
                **self._blocks,
            )

    def backward(self, tick: int, d_gates: Tensor, w_x: Tensor, w_h: Tensor, form: Any) -> None:
        """The gradients of what entered the step that `backward_cell` has just differentiated.

        Args:
            tick: The tick.
            d_gates: [L, time, B, 4, H].
            w_x: [L, 4, H, X].
            w_h: [L, 4, H, H].
            form: BLOCK_B, BLOCK_N and BLOCK_K of the products, and how to compile them.
        """
        time, B, H, W, K = self.sizes
        L, R, weights, splits = len(w_x), self.count, self.weights, self.splits
        columns = -(-W // form["BLOCK_N"]) * -(-B // form["BLOCK_B"])
        cell_products[(columns, 2 * L, splits)](
            tick,
            d_gates,
            w_x,
            w_h,
            self._products,
            time,
            B,
            H,
            w_x.shape[-1],
            W,
            self.inputs,
            LAYERS=L,
            SPLITS=splits,
            **form,
        )
        for number in range(R - 1, -1, -1):
            of_h, following = number % 2, min(number + 1, R - 1)
            backward_round[self._grid](
                tick,
                self.before[number],
                self.z[number],
                self._products[of_h],
                self._current[of_h],
                self._parts[(number + 1) % 2],
                self._parts[number % 2],
                weights.up[number],
                weights.bias[number],
                weights.down[following],
                self.d_p[number],
                self.d_z[following],
                self.parts[1],
                self.d_x,
                time,
                B,
                H,
                W,
                K,
                self.before[number].shape[-1],
                *self._widths(number),
                SPLITS=splits,
                FRESH=number >= R - 2,
                LAST=number == R - 1,
                FIRST=number == 0,
                **self._blocks,
            )
        backward_state[self._grid](
            tick,
            self._products[1],
            self._current[1],
            self._parts[0],
            weights.down[0],
            self.d_z[0],
            self.parts[0],
            time,
            B,
            H,
            W,
            K,
            self._blocks_x,
            self._blocks_h,
            SPLITS=splits,
            FRESH=R == 1,
            **self._blocks,
        )

    def operands(self, number: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The factors of the gradients of D_r [L, K, W] and U_r [L, W, K], over a whole window.

        Each pair is to be multiplied; the first of it is transposed already.
        """
        gated = self._gated()
        if number + 1 < self.count:
            read = self.before[number + 1]
        else:  # never gated again
            read = self.x if gated[number] is self.h else self.h[:, :-1]
        d_z, d_p = (d[number].flatten(1, 2).transpose(1, 2) for d in (self.d_z, self.d_p))
        return (d_z, read.flatten(1, 2)), (d_p, self.z[number].flatten(1, 2))
