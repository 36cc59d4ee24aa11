"""The hand-written gradient of an LSTM layer over a window.

With a step as in `recurrence` (j = 2s, z = 1 − f, t = σ(−2c), tanh c = 1 − 2t, m the update mask,
g the input gate) and dh, dc the gradients of its h and c:

    dc += dh · o · 4t(1 − t)                          do' = dh · (1 − 2t) · o(1 − o)
    dj' = dc · g m · (1 − 4s²)                        df' = dc · (c₋ − [z ≤ i] m j) · z(1 − z)
    dc₋ = dc · (1 − z)                                di' = dc · [z > i] m j · i(1 − i)
    dh₋ = (d_gates W_h) · state mask + the gradient from above

for the capped gate; the bracket of df' is 1 for the tied gate and 0 for the plain one.

Legend: t time steps, B rows, H hidden units, G gates, GH = G · H columns in the order j, o, f, i.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from afterdrop.models.cell import InputGate
from afterdrop.models.unrolled import per_step


def gate_factors(
    gates: Tensor, c_before: Tensor, t: Tensor, input_gate: InputGate, update_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The factors of the incoming gradients of all steps, which do not depend on them.

    Returns:
        d(gates)/d(h for o, else c) [time, B, GH] and dc/dh through tanh [time, B, H]. If 1 − f
        equals i, the whole gradient of the cap goes to f.
    """
    hidden = t.shape[2]
    s, o, z, *i = gates.split(hidden, dim=2)
    slopes = torch.addcmul(gates, gates, gates, value=-1)  # σ' = σ(1 − σ) of every gate but j
    slope_j, slope_o, slope_f, *slope_i = slopes.split(hidden, dim=2)
    torch.addcmul(s.new_ones(()), s, s, value=-4, out=slope_j)
    j = s.mul(2)
    through_tanh = torch.addcmul(t, t, t, value=-1).mul_(o).mul_(4)
    slope_o.mul_(1 - 2 * t)
    gate = i[0] if input_gate == "plain" else z
    if input_gate == "capped":
        capped = (gate <= i[0]).to(gates.dtype)
        gate = torch.minimum(gate, i[0])
    if update_mask is not None:
        j = j.mul_(update_mask)
        gate = gate * update_mask
    slope_j.mul_(gate)
    if input_gate == "plain":
        slope_f.mul_(c_before)
        slope_i[0].mul_(j)
    elif input_gate == "tied":
        slope_f.mul_(c_before - j)
    else:
        slope_f.mul_(torch.addcmul(c_before, j, capped, value=-1))
        slope_i[0].mul_(j).mul_(1 - capped)
    return slopes, through_tanh


def backward_steps(
    factors: tuple[Tensor, Tensor],
    forgotten: Tensor,
    gradients: tuple[Tensor, Tensor],
    multiply: Callable[[Tensor], Tensor],
    state_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Goes back through time and turns the factors into the gradients of the gates, in place.

    `multiply` maps the gradient of a step's gates to that of the dropped h that entered it, as a
    new tensor.

    Returns:
        The gradients of the carried h and c.
    """
    d_gates, through_tanh = factors
    dy, dc = gradients[0], gradients[1].clone()
    time, _, hidden = through_tanh.shape
    dh = torch.zeros_like(dc)
    j, o, *_ = (block.unbind(0) for block in d_gates.split(hidden, dim=2))
    rest = d_gates[..., 2 * hidden :].unflatten(2, (-1, hidden)).unbind(0)
    steps = zip(
        d_gates.unbind(0), j, o, rest, forgotten.unbind(0), dy.unbind(0), through_tanh.unbind(0)
    )
    for (d_all, d_j, d_o, d_rest, z, d_out, slope), mask in zip(
        reversed(list(steps)), reversed(per_step(state_mask, time)), strict=True
    ):
        dh = dh.add_(d_out)
        dc.addcmul_(dh, slope)
        d_o.mul_(dh)
        d_j.mul_(dc)
        d_rest.mul_(dc.unsqueeze(1))
        dh = multiply(d_all)
        if mask is not None:
            dh.mul_(mask)
        dc.addcmul_(dc, z, value=-1)
    return dh, dc
