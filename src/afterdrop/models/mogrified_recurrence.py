"""An LSTM layer with Mogrifier rounds over a window as one operator, the fast form (docs/cells.md).

The steps of the cell are those of `recurrence`; before each of them the rounds gate what enters it
(`mogrifier`). Backward, with g = 2σ(p) the gate of round r, v₋ what it gated and w what it read:

    dp = dv · v₋ g (1 − g/2)      dv₋ = dv · g      dz = dp U_r      dw += dz D_r

The factor v₋ g (1 − g/2) does not depend on the incoming gradient and is computed for all steps at
once; the gradients of all weights are one product each over the window.

Legend: t time steps, B rows, E inputs, H hidden units, G gates, GH = G · H columns j, o, f, i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from afterdrop.models.cell import InputGate
from afterdrop.models.checks import ModelError
from afterdrop.models.mogrifier import Round
from afterdrop.models.product import accumulator, row_product
from afterdrop.models.recurrence import forward_window
from afterdrop.models.recurrence_gradient import backward_steps, gate_factors

Weights = tuple[Tensor, Tensor, Tensor]


def mogrified_recurrence(
    x_tBE: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Weights,
    rounds: Sequence[Round],
    input_gate: InputGate = "capped",
    masks: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """As `lstm_recurrence`, with at least one Mogrifier round before each step.

    Example:
        >>> zero = torch.zeros(2, 3)
        >>> weights = torch.ones(12, 4), torch.ones(12, 3), torch.ones(12)
        >>> rounds = [((torch.ones(4, 3),), torch.ones(4))]
        >>> h, c = mogrified_recurrence(torch.ones(5, 2, 4), (zero, zero), weights, rounds)
        >>> h.shape, c.shape
        (torch.Size([5, 2, 3]), torch.Size([2, 3]))
    """
    flat = [tensor for factors, bias in rounds for tensor in (*factors, bias)]
    if torch.is_grad_enabled():
        return _Mogrified.apply(x_tBE, *state, *weights, *masks, input_gate, len(rounds), *flat)
    steps = _Steps(x_tBE, weights, rounds, keep=False)
    pre = steps.empty_gates()
    y_tBH, n_BH, _, _ = forward_window(pre, state, steps.forward, input_gate, masks, keep=False)
    return y_tBH, n_BH.mul(-0.5)


class _Mogrified(torch.autograd.Function):
    """`mogrified_recurrence` with its hand-written gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        x, h0, c0, w_x, w_h, bias, state_mask, update_mask, input_gate, count, *flat = inputs
        steps = _Steps(x, (w_x, w_h, bias), _rounds(flat, count), keep=True)
        masks = state_mask, update_mask
        y, n, t, gates = forward_window(
            steps.empty_gates(), (h0, c0), steps.forward, input_gate, masks, keep=True
        )
        kept = (*steps.gates, *steps.gated, *steps.inner)
        ctx.save_for_backward(x, h0, c0, w_x, w_h, bias, *masks, y, n, t, gates, *flat, *kept)
        ctx.input_gate, ctx.rounds, ctx.flat = input_gate, count, len(flat)
        return y, n[-1].mul(-0.5)

    @staticmethod
    def backward(ctx: Any, dy_tBH: Tensor, dc_BH: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "create_graph is True; an LSTM layer without layer norm has first derivatives "
                "only. Use create_graph=False, or loop over afterdrop.models.unrolled."
            )
        x, h0, c0, w_x, w_h, bias, state_mask, update_mask, y, n, t, gates, *rest = (
            ctx.saved_tensors
        )
        flat, kept = rest[: ctx.flat], rest[ctx.flat :]
        c_before = torch.cat([c0.unsqueeze(0), n[:-1].mul(-0.5)])
        factors = gate_factors(gates, c_before, t, ctx.input_gate, update_mask)
        forgotten = gates[..., 2 * y.shape[2] : 3 * y.shape[2]]
        h_before = torch.cat([h0.unsqueeze(0), y[:-1]])
        if state_mask is not None:
            h_before *= state_mask
        steps = _Steps(x, (w_x, w_h, bias), _rounds(flat, ctx.rounds), keep=False)
        steps.begin_backward(kept, h_before)
        dh, dc = backward_steps(factors, forgotten, (dy_tBH, dc_BH), steps.backward, state_mask)
        dx, *of_weights = steps.gradients(factors[0])
        dw_x, dw_h, db, *of_rounds = of_weights
        return dx, dh, dc, dw_x, dw_h, db, None, None, None, None, *of_rounds


def _rounds(flat: Sequence[Tensor], count: int) -> list[Round]:
    """Rounds from their tensors, which are two or three each."""
    size = len(flat) // count
    parts = [flat[at : at + size] for at in range(0, len(flat), size)]
    return [(tuple(part[:-1]), part[-1]) for part in parts]


class _Steps:
    """What enters the gates at each time step, and its gradient.

    Args:
        x_tBE: The (dropped) input.
        weights: W_x, W_h and the bias.
        rounds: The rounds.
        keep: Whether to keep what the gradient needs, of all steps.

    Attributes:
        gates: Per round, g = 2σ(p) of all steps; or of the last step, if nothing is kept.
        gated: Per round, what it has gated, after it.
        inner: Per round, what its first factor gives; empty for full matrices.
    """

    def __init__(
        self, x_tBE: Tensor, weights: Weights, rounds: Sequence[Round], keep: bool
    ) -> None:
        self.x, self.rounds, (self.w_x, self.w_h, self.bias) = x_tBE, rounds, weights
        time, batch, _ = x_tBE.shape
        steps = time if keep else 1

        def room(size: int) -> Tensor:
            return x_tBE.new_empty(steps, batch, size)

        self.gates = [room(len(bias)) for _, bias in rounds]
        self.gated = [room(len(bias)) for _, bias in rounds]
        self.inner = [room(len(factors[0])) for factors, _ in rounds if len(factors) == 2]
        self._add_x = accumulator(self.w_x, batch)
        self._add_h = accumulator(self.w_h, batch)
        self._two = x_tBE.new_full((), 2.0)
        inner = [part.expand(time, -1, -1).unbind(0) for part in self.inner]
        self._forward = zip(
            x_tBE.unbind(0),
            zip(*(part.expand(time, -1, -1).unbind(0) for part in self.gates)),
            zip(*(part.expand(time, -1, -1).unbind(0) for part in self.gated)),
            zip(*inner) if inner else [()] * time,
        )

    def empty_gates(self) -> Tensor:
        """The part of the gates that depends on nothing: the bias, in a tensor of its own."""
        return self.bias.expand(*self.x.shape[:2], -1).clone()

    def forward(self, pre_BGH: Tensor, h_BH: Tensor) -> Tensor:
        """The gates of the next step before their nonlinearity, from the dropped h."""
        x_BE, gates, gated, inner = next(self._forward)
        for number, (factors, bias) in enumerate(self.rounds):
            read, old = (x_BE, h_BH) if number % 2 else (h_BH, x_BE)
            if inner:
                read = torch.mm(read, factors[0].t(), out=inner[number])
            gate = torch.addmm(bias, read, factors[-1].t(), out=gates[number])
            new = torch.mul(old, gate.sigmoid_().mul_(self._two), out=gated[number])
            x_BE, h_BH = (x_BE, new) if number % 2 else (new, h_BH)
        return self._add_h(self._add_x(pre_BGH, x_BE), h_BH)

    def begin_backward(self, kept: Sequence[Tensor], h_tBH: Tensor) -> None:
        """Prepares the way back from what the forward pass kept, and the dropped h of all steps."""
        count = len(self.rounds)
        self.gates, self.gated, self.inner = (
            list(kept[at : at + count]) for at in range(0, 3 * count, count)
        )
        self._h = h_tBH
        self.d_p = []
        for gate, before in zip(self.gates, [self.x, h_tBH, *self.gated]):
            self.d_p.append(torch.addcmul(gate, gate, gate, value=-0.5).mul_(before))
        self.d_z = [torch.empty_like(z) for z in self.inner]
        self.d_x = torch.empty_like(self.x)
        batch = self.x.shape[1]
        self._to_x, self._to_h = row_product(self.w_x, batch), row_product(self.w_h, batch)
        lists = (self.gates, self.d_p, self.d_z)
        steps = [list(zip(*(part.unbind(0) for part in parts))) for parts in lists]
        steps[2] = steps[2] or [()] * len(self.x)
        self._backward = zip(*(reversed(step) for step in steps), reversed(self.d_x.unbind(0)))

    def backward(self, d_BGH: Tensor) -> Tensor:
        """The gradient of the dropped h of the previous step back in time, from its gates'."""
        gates, d_p, d_z, d_x = next(self._backward)
        dx, dh = self._to_x(d_BGH), self._to_h(d_BGH)
        for number in range(len(self.rounds) - 1, -1, -1):
            factors = self.rounds[number][0]
            dv, dw = (dh, dx) if number % 2 else (dx, dh)
            d = d_p[number].mul_(dv)
            dv.mul_(gates[number])
            if d_z:
                d = torch.mm(d, factors[1], out=d_z[number])
            dw.addmm_(d, factors[0])
        d_x.copy_(dx)
        return dh

    def gradients(self, d_gates: Tensor) -> list[Tensor]:
        """The gradients of x, of the weights, and of the tensors of each round."""
        d_tBGH = d_gates.flatten(0, 1).t()
        last = {number % 2: value for number, value in enumerate(self.gated)}
        x, h = last[0], last.get(1, self._h)
        found = [self.d_x, d_tBGH @ x.flatten(0, 1), d_tBGH @ h.flatten(0, 1), d_tBGH.sum(1)]
        for number, d_p in enumerate(self.d_p):
            read = self.gated[number - 1] if number else self._h
            d = d_p.flatten(0, 1)
            if self.inner:
                found.append(self.d_z[number].flatten(0, 1).t() @ read.flatten(0, 1))
                read = self.inner[number]
            found += [d.t() @ read.flatten(0, 1), d.sum(0)]
        return found
