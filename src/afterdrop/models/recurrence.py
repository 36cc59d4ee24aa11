"""An LSTM layer over a window as one differentiable operator, the fast form (docs/cells.md).

Forward: one product with W_x for all time steps, then per step one product with W_h and a few
pointwise operations in place. Backward: everything that does not depend on the incoming gradient is
computed for all steps at once, and dW_x, dW_h, db and dx are one product each over the window.

On a CPU torch's tanh takes four to six times as long as its sigmoid, so tanh(z) = 2σ(2z) − 1 is
used throughout: one sigmoid computes all gates after the columns j', o', f', i' are multiplied by
2, 1, −1, 1. Each operation of a step is a call into torch, so their number matters; with n = −2c
as the carried value, each term below is a single `addcmul`:

    s = σ(2j') − ½,  z = σ(−f') = 1 − f,  g = min(z, i)
    n = n₋ − z n₋ − 4 g s       (j = 2s)
    h = o − 2 o t               t = σ(n)       (tanh c = −tanh(n/2) = 1 − 2t)

The cost is an absolute error of about 1e-7 near zero in float32, the size of the rounding error of
the product.

Legend: t time steps, B rows, E inputs, H hidden units, G gates, GH = G · H columns j, o, f, i.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from afterdrop.models.cell import InputGate, gate_count
from afterdrop.models.checks import ModelError
from afterdrop.models.product import Accumulate, accumulator, linear, row_product
from afterdrop.models.recurrence_gradient import backward_steps, gate_factors
from afterdrop.models.unrolled import per_step


def lstm_recurrence(
    x_tBE: Tensor,
    state: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    input_gate: InputGate = "capped",
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """A layer over a window, differentiable once with respect to everything but the masks.

    Args:
        x_tBE: The (dropped) input.
        state: The carried (h, c), each [B, H].
        weights: W_x [GH, E], W_h [GH, H] and the bias [GH].
        input_gate: Kind of input gate.
        masks: Of the state and of the update, each [B, H], [time, B, H] or None.

    Returns:
        Every h [time, B, H] and the last c [B, H].

    Example:
        >>> zero = torch.zeros(2, 3)
        >>> weights = torch.ones(12, 4), torch.ones(12, 3), torch.ones(12)
        >>> h, c = lstm_recurrence(torch.ones(5, 2, 4), (zero, zero), weights)
        >>> h.shape, c.shape
        (torch.Size([5, 2, 3]), torch.Size([2, 3]))
    """
    if torch.is_grad_enabled():
        return _Recurrence.apply(x_tBE, *state, *weights, *masks, input_gate)
    y_tBH, n_BH, _, _ = _forward(x_tBE, state, weights, input_gate, masks, keep=False)
    return y_tBH, n_BH.mul(-0.5)


class _Recurrence(torch.autograd.Function):
    """`lstm_recurrence` with its hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, h0, c0, w_x, w_h, bias, state_mask, update_mask, input_gate = inputs
        y, n, t, gates = _forward(
            x, (h0, c0), (w_x, w_h, bias), input_gate, (state_mask, update_mask), keep=True
        )
        ctx.save_for_backward(x, h0, c0, w_x, w_h, state_mask, update_mask, y, n, t, gates)
        ctx.input_gate = input_gate
        return y, n[-1].mul(-0.5)

    @staticmethod
    def backward(ctx: Any, dy_tBH: Tensor, dc_BH: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # With torch's once_differentiable a gradient penalty would be silently wrong here.
            raise ModelError(
                "create_graph is True; an LSTM layer without layer norm has first derivatives "
                "only. Use create_graph=False, or loop over afterdrop.models.unrolled."
            )
        x, h0, c0, w_x, w_h, state_mask, update_mask, y, n, t, gates = ctx.saved_tensors
        c_before = torch.cat([c0.unsqueeze(0), n[:-1].mul(-0.5)])
        factors = gate_factors(gates, c_before, t, ctx.input_gate, update_mask)
        forgotten = gates[..., 2 * y.shape[2] : 3 * y.shape[2]]
        multiply = row_product(w_h, len(h0))
        dh, dc = backward_steps(factors, forgotten, (dy_tBH, dc_BH), multiply, state_mask)
        d_gates = factors[0].flatten(0, 1)
        h_before = torch.cat([h0.unsqueeze(0), y[:-1]])
        if state_mask is not None:
            h_before *= state_mask
        dx = (d_gates @ w_x).view_as(x) if ctx.needs_input_grad[0] else None
        dw_x = d_gates.t() @ x.flatten(0, 1)
        dw_h = d_gates.t() @ h_before.flatten(0, 1)
        return dx, dh, dc, dw_x, dw_h, d_gates.sum(0), None, None, None


def _forward(
    x_tBE: Tensor,
    state: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    input_gate: InputGate,
    masks: tuple[Tensor | None, Tensor | None],
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, n = −2c and t of all steps, and the gates after their nonlinearity (s, o, z, i).

    Without `keep`, everything but h is of the last step only, in buffers that stay in the cache.
    """
    w_x, w_h, bias = weights
    pre = linear(x_tBE.flatten(0, 1), w_x, bias).view(*x_tBE.shape[:2], -1)
    return forward_window(pre, state, accumulator(w_h, pre.shape[1]), input_gate, masks, keep)


def forward_window(
    pre: Tensor,
    state: tuple[Tensor, Tensor],
    add_recurrent: Accumulate,
    input_gate: InputGate,
    masks: tuple[Tensor | None, Tensor | None],
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_forward`, from the part of the gates that does not depend on the state.

    `add_recurrent` adds the rest, given that part and the dropped h; it is called once per step, in
    their order, and may overwrite the part.
    """
    (time, batch, _), hidden = pre.shape, state[0].shape[1]
    y = pre.new_empty(time, batch, hidden)
    n, t = pre.new_empty((2, *(y.shape if keep else y.shape[1:])))
    gates = pre if keep else torch.empty_like(pre[0])
    # All views are made here, once per window: slicing at each step would cost as much as a
    # multiplication.
    parts = (pre, gates, y, n, t, *masks, *gates.split(hidden, dim=-1))
    steps = zip(*(per_step(part, time) for part in parts))
    _forward_steps(steps, state, add_recurrent, input_gate)
    return y, n, t, gates


def _forward_steps(
    steps: Iterable[tuple[Any, ...]],
    state: tuple[Tensor, Tensor],
    add_recurrent: Accumulate,
    input_gate: InputGate,
) -> None:
    """Fills h, n, t and the gates of each step from the input's part of the gates."""
    h, n = state[0], state[1].mul(-2)
    kept, g = torch.empty_like(h), torch.empty_like(n)
    # As tensors, because a Python number would be converted again at each step.
    half = h.new_full((), 0.5)
    scale = _column_factors(h, input_gate)
    for pre, gates, h_out, n_out, t, state_mask, update_mask, s, o, z, *i in steps:
        entering = h if state_mask is None else torch.mul(h, state_mask, out=kept)
        torch.sigmoid(add_recurrent(pre, entering).mul_(scale), out=gates)
        s.sub_(half)
        gate = i[0] if input_gate == "plain" else z
        if input_gate == "capped":
            gate = torch.minimum(z, i[0], out=g)
        if update_mask is not None:
            gate = torch.mul(gate, update_mask, out=g)
        torch.addcmul(n, n, z, value=-1, out=n_out)
        n = n_out.addcmul_(gate, s, value=-4)
        torch.sigmoid(n, out=t)
        h = torch.addcmul(o, o, t, value=-2, out=h_out)


def _column_factors(h_BH: Tensor, input_gate: InputGate) -> Tensor:
    """The factors of the columns j', o', f', i'; filled in place, without a copy to a GPU."""
    hidden = h_BH.shape[1]
    factors = h_BH.new_ones(gate_count(input_gate) * hidden)
    factors[:hidden].fill_(2)
    factors[2 * hidden : 3 * hidden].fill_(-1)
    return factors
