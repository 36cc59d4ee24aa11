"""One step of the LSTM as equations: the reference form (docs/cells.md), with autograd.

    [j' o' f' i'] = x̃ W_xᵀ + h̃ W_hᵀ + b         j = tanh(j') · mask    o, f, i = σ(o', f', i')
    c = f · c₋ + g · j                           g = min(1 − f, i)  capped
    h = o · tanh(c)                                  1 − f          tied (no i' at all)
                                                     i              plain

The cap keeps |c| ≤ 1 (Melis et al., "On the state of the art of evaluation in neural language
models", 2018). The carried and emitted h is the undropped one; only the copy h̃ that enters the
gates is dropped.

Legend: B rows, H hidden units, G gates (4, or 3 if tied), GH = G · H columns in the order above.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

InputGate = Literal["capped", "tied", "plain"]
INPUT_GATES: tuple[InputGate, ...] = ("capped", "tied", "plain")

# Inside the square root, as in lamb; it only guards against a constant vector.
NORM_EPSILON = 1e-9


def gate_count(input_gate: InputGate) -> int:
    """The number of blocks of H columns: 4, or 3 with tied gates, which need no i'.

    Example:
        >>> gate_count("capped"), gate_count("tied")
        (4, 3)
    """
    return 3 if input_gate == "tied" else 4


def normalise(x: Tensor, gain: Tensor, shift: Tensor | None = None) -> Tensor:
    """Layer normalisation over the last dimension, with a gain and optionally a shift per element.

    Example:
        >>> normalise(torch.tensor([1.0, 3.0]), torch.ones(2))
        tensor([-1.,  1.])
    """
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gain, shift, NORM_EPSILON)


def lstm_step(
    gates_BGH: Tensor,
    c_BH: Tensor,
    input_gate: InputGate = "capped",
    update_mask_BH: Tensor | None = None,
    cell_norm: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One step from the gates before their nonlinearity to the new (h, c).

    Update dropout is plain inverted dropout of the candidate j. lamb also multiplies j by 1.5 for
    capped and tied gates, and scales differently in training and evaluation. That is a defect and
    is not reproduced here.

    Args:
        gates_BGH: j', o', f', i' (no i' if tied), bias included.
        c_BH: The carried cell.
        input_gate: `"capped"`, `"tied"` or `"plain"`.
        update_mask_BH: Mask of the candidate, already rescaled.
        cell_norm: Gain and shift of a layer norm of c on its way to h; the carried c stays raw.

    Returns:
        h and c, each [B, H].

    Example:
        >>> h, c = lstm_step(torch.zeros(1, 8), torch.ones(1, 2))
        >>> c
        tensor([[0.5000, 0.5000]])
    """
    hidden = c_BH.shape[-1]
    j_BH = gates_BGH[..., :hidden].tanh()
    o_BH, f_BH, *i_BH = gates_BGH[..., hidden:].sigmoid().split(hidden, dim=-1)
    if input_gate == "plain":
        g_BH = i_BH[0]
    elif input_gate == "tied":
        g_BH = 1 - f_BH
    else:
        g_BH = torch.minimum(1 - f_BH, i_BH[0])
    if update_mask_BH is not None:
        j_BH = j_BH * update_mask_BH
    c_BH = f_BH * c_BH + g_BH * j_BH
    seen_BH = c_BH if cell_norm is None else normalise(c_BH, *cell_norm)
    return o_BH * seen_BH.tanh(), c_BH
