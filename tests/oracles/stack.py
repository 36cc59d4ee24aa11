"""A stack of LSTM layers in plain torch operations, for autograd in float64.

Restated from the equations, without imports from `afterdrop`. Masks are expanded: [L, time, B, H]
for the state and [L - 1, time, B, H] between layers.
"""

import torch


def mogrify(x, h, rounds):
    """x and h after rounds of (D, U, b): x is gated first."""
    for number, (down, up, bias) in enumerate(rounds):
        read = x if number % 2 else h
        gate = 2 * (read @ down.T @ up.T + bias).sigmoid()
        x, h = (x, h * gate) if number % 2 else (x * gate, h)
    return x, h


def stack(x, h_LBH, c_LBH, layers, masks, capped, skip, rounds=None):
    """Output [time, B, H], and the last h and c, each [L, B, H]; `rounds` of each layer."""
    state_mask, inter_mask = masks
    total, read, hs, cs = 0.0, x, [], []
    for k, (w_x, w_h, bias) in enumerate(layers):
        h, c, out = h_LBH[k], c_LBH[k], []
        for t in range(len(x)):
            x_t, h_t = mogrify(read[t], h * state_mask[k, t], rounds[k] if rounds else [])
            gates = x_t @ w_x.T + h_t @ w_h.T + bias
            j, o, f, i = gates.chunk(4, -1)
            j, o, f, i = j.tanh(), o.sigmoid(), f.sigmoid(), i.sigmoid()
            c = f * c + (torch.minimum(1 - f, i) if capped else i) * j
            h = o * c.tanh()
            out.append(h)
        y = torch.stack(out)
        total = total + y if skip else y
        read = y * inter_mask[k] if k + 1 < len(layers) else None
        hs.append(h)
        cs.append(c)
    return total, torch.stack(hs), torch.stack(cs)
