"""A stack of LSTM layers over windows of one size: its buffers, and the ticks that fill them.

Weights are held as 16-bit copies, padded so that every product is aligned: H to H₊ > H, a multiple
of 32. Padding units have zero weights and stay exactly zero, except for one: unit H of the dropped
state is 1, so that the gradient of the bias is a column of that of U. Cell states and sums are
float32.

Letters as in `lstm_forward`: L layers, `time` steps, B rows, H units, X inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from afterdrop.kernels.gpu_properties import processors
from afterdrop.kernels.lstm_backward import backward_cell, backward_products
from afterdrop.kernels.lstm_forward import forward_tick
from afterdrop.kernels.lstm_start import start_window
from afterdrop.kernels.mogrifier_rounds import LayerRounds, Rounds, RoundWeights
from afterdrop.kernels.stack_sizes import StackSizes, stack_sizes

UNIT = 32  # sizes are padded to multiples of it: 64 bytes of 16-bit elements
_BLOCK_CELL = 512  # elements per program that has no product


def padded(size: int) -> int:
    """The size plus one unit, rounded up to a multiple of 32.

    Example:
        >>> padded(723), padded(736)
        (736, 768)
    """
    return -(-(size + 1) // UNIT) * UNIT


def fine(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates, masks, tables and logits: float16 for bfloat16, as it is 8 times finer.

    Example:
        >>> fine(torch.bfloat16), fine(torch.float32)
        (torch.float16, torch.float32)
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


@dataclass(frozen=True)
class StackShape:
    """The sizes of a stack of equal layers and of its windows.

    Attributes:
        inputs: Units that enter the first layer.
        hidden: H of every layer.
        layers: L.
        rows: B.
        time: Steps per window.
        capped: Whether the input gate is capped at 1 − f; otherwise it is plain.
        skip: Whether the output is the sum of all layers; otherwise it is that of the last one.
        rounds: Mogrifier rounds.
        rank: Their rank.
    """

    inputs: int
    hidden: int
    layers: int
    rows: int
    time: int
    capped: bool = True
    skip: bool = True
    rounds: int = 0
    rank: int = 0


class StackWeights:
    """Padded copies of a stack's weights.

    Args:
        shape: The sizes.
        dtype: The dtype of the operands of products.
        device: The device.
    """

    def __init__(self, shape: StackShape, dtype: torch.dtype, device: torch.device) -> None:
        L, H = shape.layers, padded(shape.hidden)
        X = max(padded(shape.inputs), H if L > 1 else 0)
        self.w_x = torch.zeros(L, 4, H, X, dtype=dtype, device=device)
        self.w_h = torch.zeros(L, 4, H, H, dtype=dtype, device=device)
        self.bias = torch.zeros(L, 4, H, device=device)
        self.hidden = shape.hidden
        self.inputs = (shape.inputs, *[shape.hidden] * (L - 1))
        self.rounds: RoundWeights | None = None
        if shape.rounds:
            sizes = shape.rounds, shape.rank, L, max(X, H), padded(shape.rank)
            self.rounds = RoundWeights(*sizes, self.w_x)

    def pack(
        self,
        layers: Sequence[tuple[Tensor, Tensor, Tensor]],
        rounds: Sequence[LayerRounds] = (),
    ) -> None:
        """Copies W_x [4H, E], W_h [4H, H], the bias [4H] and the rounds of each layer."""
        if self.rounds is not None:
            self.rounds.pack(rounds)
        H = self.hidden
        for at, (w_x, w_h, bias) in enumerate(layers):
            self.w_x[at, :, :H, : self.inputs[at]].copy_(w_x.view(4, H, -1))
            self.w_h[at, :, :H, :H].copy_(w_h.view(4, H, H))
            self.bias[at, :, :H].copy_(bias.view(4, H))


StackSharing = Literal["none", "sequence", "step"]
_SHARING = {"none": 0, "sequence": 1, "step": 2}


class Stack:
    """Runs windows through a stack, forward and backward.

    Draw the masks, fill `x[0, ..., :inputs]` with the dropped input, then call `start`, `forward`
    and `backward`.

    Args:
        shape: The sizes.
        weights: The weights, shared by all windows.
        state: How state masks are shared over time, or "none" without state masks.
        inter: How inter-layer masks are shared over time, or "none" without them.
        training: Whether to keep what `backward` needs.
        sizes: Sizes of programs; None for those of `stack_sizes`.
    """

    def __init__(
        self,
        shape: StackShape,
        weights: StackWeights,
        state: StackSharing = "none",
        inter: StackSharing = "none",
        training: bool = True,
        sizes: StackSizes | None = None,
    ) -> None:
        self.shape, self.weights, self.training = shape, weights, training
        self.sharing = state, inter if shape.layers > 1 else "none"
        dtype, device = weights.w_x.dtype, weights.w_x.device
        L, B, time, H = shape.layers, shape.rows, shape.time, weights.w_h.shape[-1]
        X = weights.w_x.shape[-1]
        self.x = torch.zeros(L, time, B, X, dtype=dtype, device=device)
        self.h = torch.zeros(L, time + 1, B, H, dtype=dtype, device=device)
        self.c = torch.zeros(L, time + 1, B, H, device=device)
        self.out = torch.zeros(time, B, H, device=device)
        self.last = torch.zeros(L, B, H, device=device)
        kept = (L, time, B, 4, H) if training else (1,)
        keep_as = fine(dtype)
        self.gates = torch.zeros(kept, dtype=keep_as, device=device)
        self.d_gates = torch.zeros(kept, dtype=dtype, device=device)
        self.sizes = sizes or stack_sizes(H, L, B, *processors(device))
        self.parts = torch.zeros(2, self.sizes.splits, L, B, H, device=device)
        self.dc = torch.zeros(L, B, H, device=device)
        self.masks = tuple(
            torch.ones(layers, time if sharing == "step" else 1, B, H, dtype=keep_as, device=device)
            if sharing != "none"
            else torch.ones(1, dtype=keep_as, device=device)
            for sharing, layers in zip(self.sharing, (L, max(1, L - 1)))
        )
        self.widths = [padded(shape.inputs), *[H] * (L - 1)]  # padded inputs of each layer
        self.rounds: Rounds | None = None
        if weights.rounds is not None:
            ones = shape.hidden if training else -1
            self.rounds = Rounds(
                weights.rounds, self.x, self.h, self.widths[0], ones, self.sizes.splits, training
            )

    @property
    def ticks(self) -> int:
        """Launches per window, forward or backward."""
        return self.shape.time + self.shape.layers - 1

    def start(self, kept: Tensor | None = None) -> None:
        """Continues from `last` and the last `c`; rows where `kept` is 0 start from zero.

        Args:
            kept: [B], or fewer rows, repeated for all samples of them; None to keep all.
        """
        L, B, H = self.last.shape
        start_window[(-(-B * H // _BLOCK_CELL), L)](
            self.last,
            self.c,
            self.last if kept is None else kept,
            self.masks[0],
            self.h,
            self.dc,
            self.shape.time,
            B,
            H,
            1 if kept is None else len(kept),
            self.shape.hidden if self.training else -1,
            RESETS=kept is not None,
            STATE=_SHARING[self.sharing[0]],
            BLOCK=_BLOCK_CELL,
        )

    def forward(self) -> None:
        """Fills `out` [time, B, H₊], `last` and `c` of the window."""
        shape, weights = self.shape, self.weights
        L, B, time = shape.layers, shape.rows, shape.time
        H, X = weights.w_h.shape[-1], weights.w_x.shape[-1]
        grid = (-(-B // self.sizes.rows), H // self.sizes.forward["BLOCK_U"], L)
        for tick in range(self.ticks):
            if self.rounds is not None:
                self.rounds.forward(tick)
            forward_tick[grid](
                tick,
                self.x,
                self.h,
                weights.w_x,
                weights.w_h,
                weights.bias,
                self.c,
                self.gates,
                self.out,
                self.last,
                *self.masks,
                time,
                B,
                H,
                X,
                padded(shape.inputs),
                shape.hidden if self.training else -1,
                LAYERS=L,
                CAPPED=shape.capped,
                SKIP=shape.skip,
                KEEP=self.training,
                STATE=_SHARING[self.sharing[0]],
                INTER=_SHARING[self.sharing[1]],
                BLOCK_B=self.sizes.rows,
                **self.sizes.forward,
            )

    def backward(self, dy: Tensor, mask: Tensor | None = None) -> None:
        """Fills `d_gates`.

        Args:
            dy: [time, B, H₊] the gradient of the output after output dropout.
            mask: [time or 1, B, H₊] the mask of output dropout, or None.
        """
        shape, weights = self.shape, self.weights
        L, B, time = shape.layers, shape.rows, shape.time
        H, X = weights.w_h.shape[-1], weights.w_x.shape[-1]
        blocks = -(-H // self.sizes.products["BLOCK_N"]) * -(-B // self.sizes.rows)
        products = (blocks, 2 * L, self.sizes.splits)
        cells = (-(-B * H // _BLOCK_CELL), L)
        rounds, form = self.rounds, {"BLOCK_B": self.sizes.rows, **self.sizes.products}
        sizes = {"LAYERS": L, "SPLITS": self.sizes.splits if rounds is None else 1}
        out = 0 if mask is None else min(2, len(mask))
        for tick in range(self.ticks):
            if rounds is None:
                backward_products[products](
                    tick,
                    self.d_gates,
                    weights.w_x,
                    weights.w_h,
                    self.parts,
                    time,
                    B,
                    H,
                    X,
                    **sizes,
                    **form,
                )
            backward_cell[cells](
                tick,
                self.parts if rounds is None else rounds.parts,
                dy,
                self.dc,
                self.c,
                self.gates,
                self.d_gates,
                *self.masks,
                dy if mask is None else mask,
                time,
                B,
                H,
                **sizes,
                CAPPED=shape.capped,
                SKIP=shape.skip,
                STATE=_SHARING[self.sharing[0]],
                INTER=_SHARING[self.sharing[1]],
                OUT=out,
                BLOCK=_BLOCK_CELL,
            )
            if rounds is not None:
                rounds.backward(tick, self.d_gates, weights.w_x, weights.w_h, form)

    def recurrent_gradients(self, d_w_h: Tensor) -> None:
        """Writes the gradients of U [L, 4H₊, H₊], whose column H is the gradient of the bias."""
        product(self._d_gates_t(), self.h[:, :-1].flatten(1, 2), d_w_h)

    def input_weight_gradients(self, d_w_x: Tensor) -> None:
        """Writes the gradients of W [L, 4H₊, X₊]."""
        d = self._d_gates_t()
        for layers, width in _equal(self.widths):
            x = self.x[layers, ..., :width].flatten(1, 2)
            product(d[layers], x, d_w_x[layers, :, :width])

    def round_gradients(self, d_down: Tensor, d_up: Tensor) -> None:
        """Writes the gradients of D [R, L, K₊, W₊] and U [R, L, W₊, K₊] of all rounds.

        Column `rank` of the latter is the gradient of the bias.
        """
        assert self.rounds is not None
        for number in range(self.rounds.count):
            (d_z, read), (d_p, z) = self.rounds.operands(number)
            product(d_z, read, d_down[number, ..., : read.shape[-1]])
            product(d_p, z, d_up[number])

    def _d_gates_t(self) -> Tensor:
        """[L, 4H₊, time · B]."""
        return self.d_gates.flatten(3).flatten(1, 2).transpose(1, 2)

    def input_gradient(self) -> Tensor:
        """The gradient [time · B, inputs₊] of the first layer's dropped input."""
        width = self.widths[0]
        if self.rounds is not None:
            return self.rounds.d_x.flatten(0, 1)[:, :width]
        d = self.d_gates[0].flatten(0, 1).flatten(1)
        return product(d, self.weights.w_x[0].flatten(0, 1)[:, :width])


def _equal(widths: list[int]) -> list[tuple[slice, int]]:
    """Groups of layers with inputs of one width: all of them, or the first and the others."""
    first, *others = widths
    if all(width == first for width in others):
        return [(slice(None), first)]
    return [(slice(0, 1), first), (slice(1, None), others[0])]


def product(
    a: Tensor,
    b: Tensor,
    out: Tensor | None = None,
    scale: float = 1.0,
    *,
    add: bool = False,
) -> Tensor:
    """The product of matrices with 16-bit elements, or of batches of them, summed in float32.

    Args:
        a: [..., rows, inner].
        b: [..., inner, columns].
        out: The result, float32 or of the dtype of `a`; None for a new float32 tensor.
        scale: Factor of the product; only for single matrices.
        add: Whether to add to what is in `out`; only for single matrices and a float32 `out`.

    Returns:
        `out`.
    """
    assert (scale == 1 and not add) or a.dim() == 2
    assert not add or (out is not None and out.dtype == torch.float32)
    if out is None:
        out = torch.empty(*a.shape[:-1], b.shape[-1], device=a.device)
    if not (a.is_cuda and a.dtype in (torch.bfloat16, torch.float16)):
        found = a.float() @ b.float() * scale
        out.copy_(out + found if add else found)
    elif out.dtype == a.dtype and scale == 1:
        torch.matmul(a, b, out=out)
    elif a.dim() == 2:
        torch.addmm(out, a, b, torch.float32, beta=int(add), alpha=scale, out=out)
    else:
        torch.bmm(a, b, torch.float32, out=out)
    return out
