"""A stack of LSTM layers with dropout on its input and between layers.

    skip       layer k reads h of layer k−1; the output is the sum of all layers' h (default)
    residual   layer k reads, and the output is, the running sum; the input is not part of it
    plain      layer k reads h of layer k−1; the output is the last layer's h

Inter-layer dropout acts on the input of the next layer, never on the path to the output.

Legend: t time steps, B rows, E inputs, H hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from afterdrop.models.cell import InputGate
from afterdrop.models.checks import ModelError, check_choice, check_sizes
from afterdrop.models.layer import LSTMLayer, State
from afterdrop.models.mask import Drop, MaskConfig

Stacking = Literal["skip", "residual", "plain"]
STACKINGS: tuple[Stacking, ...] = ("skip", "residual", "plain")
StackState = tuple[State, ...]


def check_stacking(stacking: Stacking, hidden_sizes: Sequence[int]) -> None:
    """Requires a known stacking, and equal sizes if layers are summed.

    Example:
        >>> check_stacking("plain", (4, 8))
    """
    check_choice("stacking", stacking, STACKINGS)
    if stacking != "plain" and len(set(hidden_sizes)) > 1:
        raise ModelError(
            f"stacking is {stacking!r} and hidden_sizes is {tuple(hidden_sizes)!r}; layers of "
            "different sizes cannot be summed. Give equal sizes, or stacking='plain'."
        )


class LSTMStack(nn.Module):
    """Layers of LSTM: x [time, B, E] to [time, B, H].

    Args:
        input_size: E.
        hidden_sizes: H of each layer.
        input_gate: `"capped"`, `"tied"` or `"plain"`.
        stacking: `"skip"`, `"residual"` or `"plain"`.
        layer_norm: Whether each layer normalises.
        forget_bias: Mean of the forget gates' initial bias.
        mogrifier_rounds: Number of Mogrifier rounds of each layer; 0 for none.
        mogrifier_rank: Rank of their matrices; 0 for full matrices.
        input_dropout: Site on x.
        inter_layer_dropout: Sites between layers, one per layer after the first.
        state_dropout: Sites on each layer's recurrent h.
        update_dropout: Sites on each layer's candidate.
        generator: Generator of the initial weights; None is torch's global one.

    Example:
        >>> stack = LSTMStack(4, (3, 3), state_dropout=MaskConfig(0.5, "sequence"))
        >>> y, state = stack(torch.ones(5, 2, 4))
        >>> y.shape, len(state)
        (torch.Size([5, 2, 3]), 2)
    """

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int],
        *,
        input_gate: InputGate = "capped",
        stacking: Stacking = "skip",
        layer_norm: bool = False,
        forget_bias: float = 1.0,
        mogrifier_rounds: int = 0,
        mogrifier_rank: int = 0,
        input_dropout: MaskConfig = MaskConfig(),  # noqa: B008 (frozen)
        inter_layer_dropout: MaskConfig = MaskConfig(),  # noqa: B008 (frozen)
        state_dropout: MaskConfig = MaskConfig(sharing="sequence"),  # noqa: B008 (frozen)
        update_dropout: MaskConfig = MaskConfig(sharing="sequence"),  # noqa: B008 (frozen)
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_sizes("hidden_sizes", hidden_sizes)
        check_stacking(stacking, hidden_sizes)
        self.stacking = stacking
        self.input_dropout = Drop(input_dropout)
        self.inter_layer_dropout = nn.ModuleList(
            Drop(inter_layer_dropout) for _ in hidden_sizes[1:]
        )
        self.layers = nn.ModuleList(
            LSTMLayer(
                size_in,
                size,
                input_gate=input_gate,
                layer_norm=layer_norm,
                forget_bias=forget_bias,
                mogrifier_rounds=mogrifier_rounds,
                mogrifier_rank=mogrifier_rank,
                state_dropout=state_dropout,
                update_dropout=update_dropout,
                generator=generator,
            )
            for size_in, size in zip((input_size, *hidden_sizes), hidden_sizes)
        )

    def initial_state(self, batch: int) -> StackState:
        """Zeros: (h, c) of each layer, each [B, H].

        Example:
            >>> LSTMStack(4, (3,)).initial_state(2)[0][0].shape
            torch.Size([2, 3])
        """
        return tuple(
            (like.new_zeros(batch, size), like.new_zeros(batch, size))
            for like, size in ((layer.weight_h, layer.hidden_size) for layer in self._lstms())
        )

    def forward(self, x_tBE: Tensor, state: StackState | None = None) -> tuple[Tensor, StackState]:
        """The output of every step and the state after the window."""
        if x_tBE.dim() != 3 or 0 in x_tBE.shape:
            raise ModelError(
                f"x has shape {tuple(x_tBE.shape)}; a stack reads [time, B, E] with no size of 0. "
                "Put time first and give at least one step and one row."
            )
        if state is None:
            state = self.initial_state(x_tBE.shape[1])
        self._check_state(state, x_tBE.shape[1])
        y_tBH, after = self.layers[0](self.input_dropout(x_tBE), state[0])
        total_tBH, states = y_tBH, [after]
        for layer, drop, before in zip(self.layers[1:], self.inter_layer_dropout, state[1:]):
            read_tBH = total_tBH if self.stacking == "residual" else y_tBH
            y_tBH, after = layer(drop(read_tBH), before)
            total_tBH = y_tBH if self.stacking == "plain" else total_tBH + y_tBH
            states.append(after)
        return total_tBH, tuple(states)

    def _lstms(self) -> list[LSTMLayer]:
        return [layer for layer in self.layers if isinstance(layer, LSTMLayer)]

    def _check_state(self, state: StackState, batch: int) -> None:
        wanted = [(batch, layer.hidden_size) for layer in self._lstms()]
        given = [tuple(part.shape) for pair in state for part in pair]
        if given != [shape for shape in wanted for _ in ("h", "c")]:
            raise ModelError(
                f"state holds shapes {given}; this window needs h and c of shapes {wanted}, one "
                "pair per layer. "
                f"Start from initial_state({batch}), or carry the state of the same rows."
            )
