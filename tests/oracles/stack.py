"""A stack of LSTM layers in plain torch operations, for autograd in float64.

Restated from the equations, without imports from `afterdrop`. Masks are expanded: [L, time, B, H]
for the state and [L - 1, time, B, H] between layers.
"""

import torch


def stack(x, h_LBH, c_LBH, layers, masks, capped, skip):
    """Output [time, B, H], and the last h and c, each [L, B, H]."""
    state_mask, inter_mask = masks
    total, read, hs, cs = 0.0, x, [], []
    for k, (w_x, w_h, bias) in enumerate(layers):
        h, c, out = h_LBH[k], c_LBH[k], []
        for t in range(len(x)):
            gates = read[t] @ w_x.T + (h * state_mask[k, t]) @ w_h.T + bias
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
