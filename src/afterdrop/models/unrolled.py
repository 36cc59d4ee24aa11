"""An LSTM layer over a window as a loop of `lstm_step`, the form that supports all options.

Legend: t time steps, B rows, H hidden units, G gates, GH = G · H columns in the order j, o, f, i.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from afterdrop.models.cell import InputGate, lstm_step


def per_step(mask: Tensor | None, time: int) -> list[Tensor | None]:
    """The mask of each step, from one for the window [B, H], one per step [time, B, H], or None.

    Example:
        >>> len(per_step(None, 3)), len(per_step(torch.ones(3, 2, 4), 3))
        (3, 3)
    """
    if mask is None or mask.dim() == 2:
        return [mask] * time
    return list(mask.unbind(0))


def unrolled_recurrence(
    inputs_tB: Tensor,
    state: tuple[Tensor, Tensor],
    gates: Callable[[Tensor, Tensor], Tensor],
    input_gate: InputGate,
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
    cell_norm: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """A layer over a window as a loop of `lstm_step`, differentiable by autograd.

    Args:
        inputs_tB: What `gates` takes of each time step, [time, B, ...].
        state: The carried (h, c).
        gates: Maps that of a step, and the dropped h, to the gates [B, GH] before their
            nonlinearity, bias included.
        input_gate: Kind of input gate.
        masks: Of the state and of the update, each [B, H], [time, B, H] or None.
        cell_norm: Gain and shift of c's layer norm.

    Returns:
        Every h [time, B, H] and the last c [B, H].

    Example:
        >>> zero = torch.zeros(2, 3)
        >>> weight = torch.zeros(3, 12)
        >>> h, c = unrolled_recurrence(
        ...     torch.zeros(5, 2, 12), (zero, zero), lambda x, h: x + h @ weight, "capped"
        ... )
        >>> h.shape
        torch.Size([5, 2, 3])
    """
    h_BH, c_BH = state
    state_masks, update_masks = (per_step(mask, len(inputs_tB)) for mask in masks)
    outputs = []
    for input_B, state_mask, update_mask in zip(
        inputs_tB.unbind(0), state_masks, update_masks, strict=True
    ):
        kept_BH = h_BH if state_mask is None else h_BH * state_mask
        h_BH, c_BH = lstm_step(gates(input_B, kept_BH), c_BH, input_gate, update_mask, cell_norm)
        outputs.append(h_BH)
    return torch.stack(outputs), c_BH
