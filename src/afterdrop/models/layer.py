"""One LSTM layer: its parameters, and the two dropout sites inside its recurrence.

Legend: t time steps, B rows, E inputs, H hidden units, G gates, GH = G · H rows j, o, f, i.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afterdrop.models.cell import INPUT_GATES, InputGate, gate_count, normalise
from afterdrop.models.checks import check_choice, check_flag, check_number, check_size
from afterdrop.models.initial import gate_normal_
from afterdrop.models.mask import Mask, MaskConfig
from afterdrop.models.mogrified_recurrence import mogrified_recurrence
from afterdrop.models.mogrifier import Mogrifier, mogrify
from afterdrop.models.recurrence import lstm_recurrence
from afterdrop.models.unrolled import unrolled_recurrence

State = tuple[Tensor, Tensor]


class LSTMLayer(nn.Module):
    """An LSTM layer: x [time, B, E] and the state (h, c) to every h [time, B, H] and the new state.

    With layer norm, x W_xᵀ and h W_hᵀ are normalised separately, each over all gates jointly and
    with a gain per element, before the bias is added; c is normalised with gain and shift on its
    way to h. With Mogrifier rounds, x and h gate each other before each step (see `mogrifier`).
    Under autocast the layer computes in the dtype of its weights.

    Args:
        input_size: E.
        hidden_size: H.
        input_gate: `"capped"` (default), `"tied"` or `"plain"`.
        layer_norm: Whether to normalise.
        forget_bias: Mean of the forget gate's initial bias.
        mogrifier_rounds: Number of Mogrifier rounds; 0 for none.
        mogrifier_rank: Rank of their matrices; 0 for full matrices.
        state_dropout: Site on the h that enters the gates; the carried h is never dropped.
        update_dropout: Site on the candidate j.
        generator: Generator of the initial weights; None is torch's global one.

    Example:
        >>> layer = LSTMLayer(4, 3, state_dropout=MaskConfig(0.5, "sequence"))
        >>> zero = torch.zeros(2, 3)
        >>> y, (h, c) = layer(torch.ones(5, 2, 4), (zero, zero))
        >>> y.shape, bool((y[-1] == h).all())
        (torch.Size([5, 2, 3]), True)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        input_gate: InputGate = "capped",
        layer_norm: bool = False,
        forget_bias: float = 1.0,
        mogrifier_rounds: int = 0,
        mogrifier_rank: int = 0,
        state_dropout: MaskConfig = MaskConfig(sharing="sequence"),  # noqa: B008 (frozen)
        update_dropout: MaskConfig = MaskConfig(sharing="sequence"),  # noqa: B008 (frozen)
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_size("input_size", input_size)
        check_size("hidden_size", hidden_size)
        check_choice("input_gate", input_gate, INPUT_GATES)
        check_flag("layer_norm", layer_norm)
        check_number("forget_bias", forget_bias)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.input_gate, self.forget_bias = input_gate, forget_bias
        rows = gate_count(input_gate) * hidden_size
        self.weight_x = nn.Parameter(torch.empty(rows, input_size))
        self.weight_h = nn.Parameter(torch.empty(rows, hidden_size))
        self.bias = nn.Parameter(torch.empty(rows))
        self.layer_norm = layer_norm
        if layer_norm:
            self.gain_x = nn.Parameter(torch.empty(rows))
            self.gain_h = nn.Parameter(torch.empty(rows))
            self.gain_c = nn.Parameter(torch.empty(hidden_size))
            self.shift_c = nn.Parameter(torch.empty(hidden_size))
        self.mogrifier = Mogrifier(mogrifier_rounds, mogrifier_rank, input_size, hidden_size)
        self.state_dropout = Mask(state_dropout)
        self.update_dropout = Mask(update_dropout)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws new initial weights (see `initial`)."""
        hidden = self.hidden_size
        gate_normal_(self.weight_x, self.input_size, generator=generator)
        gate_normal_(self.weight_h, hidden, generator=generator)
        gate_normal_(self.bias, hidden, generator=generator)
        self.bias[2 * hidden : 3 * hidden] += self.forget_bias
        if self.layer_norm:
            for gain in (self.gain_x, self.gain_h, self.gain_c):
                gain.fill_(1)
            self.shift_c.zero_()
        self.mogrifier.reset_parameters(generator)

    def forward(self, x_tBE: Tensor, state: State) -> tuple[Tensor, State]:
        """Every h of the window and the state after it."""
        masks = (
            self.state_dropout(len(x_tBE), state[0]),
            self.update_dropout(len(x_tBE), state[0]),
        )
        with torch.autocast(x_tBE.device.type, enabled=False):
            x_tBE = x_tBE.to(self.weight_x.dtype)
            run = self._unrolled if self.layer_norm else self._fused
            y_tBH, c_BH = run(x_tBE, state, masks)
        return y_tBH, (y_tBH[-1], c_BH)

    def _fused(
        self, x_tBE: Tensor, state: State, masks: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        weights = self.weight_x, self.weight_h, self.bias
        rounds = self.mogrifier.rounds
        if rounds:
            return mogrified_recurrence(x_tBE, state, weights, rounds, self.input_gate, masks)
        return lstm_recurrence(x_tBE, state, weights, self.input_gate, masks)

    def _unrolled(
        self, x_tBE: Tensor, state: State, masks: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        rounds = self.mogrifier.rounds
        # Without rounds the input's part of the gates is one product for all steps.
        inputs_tB = x_tBE if rounds else self._from_input(x_tBE)

        def gates(input_B: Tensor, h_BH: Tensor) -> Tensor:
            if not rounds:
                return input_B + self._from_state(h_BH)
            x_BE, h_BH = mogrify(input_B, h_BH, rounds)
            return self._from_input(x_BE) + self._from_state(h_BH)

        cell_norm = (self.gain_c, self.shift_c) if self.layer_norm else None
        return unrolled_recurrence(inputs_tB, state, gates, self.input_gate, masks, cell_norm)

    def _from_input(self, x: Tensor) -> Tensor:
        """The input's part of the gates, bias included."""
        if self.layer_norm:
            return normalise(x @ self.weight_x.t(), self.gain_x) + self.bias
        return F.linear(x, self.weight_x, self.bias)

    def _from_state(self, h_BH: Tensor) -> Tensor:
        """The state's part of the gates."""
        part_BGH = h_BH @ self.weight_h.t()
        return normalise(part_BGH, self.gain_h) if self.layer_norm else part_BGH
