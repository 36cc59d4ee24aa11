"""The LSTM language model, restated from the equations one number at a time in float64.

Independent of `afterdrop.models`, from which nothing is imported; nothing is vectorised over time,
rows or units. Masks are given, already rescaled, in full shape [time][row][unit], or None.
"""

import math

import numpy as np


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def layer_norm(values: list[float], gain, shift=None) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    scaled = [(v - mean) / math.sqrt(variance + 1e-9) * g for v, g in zip(values, gain)]
    return scaled if shift is None else [v + s for v, s in zip(scaled, shift)]


def dot_rows(weight, vector) -> list[float]:
    return [sum(float(w) * v for w, v in zip(row, vector)) for row in weight]


def mogrify(x, h, p):
    """Rounds of the Mogrifier: x gated by h, h by x, and so on, one unit at a time."""
    number = 0
    while f"mogrifier.bias.{number}" in p:
        read, gated = (x, h) if number % 2 else (h, x)
        if f"mogrifier.weight.{number}" in p:
            sums = dot_rows(p[f"mogrifier.weight.{number}"], read)
        else:
            inner = dot_rows(p[f"mogrifier.down.{number}"], read)
            sums = dot_rows(p[f"mogrifier.up.{number}"], inner)
        bias = p[f"mogrifier.bias.{number}"]
        gated = [v * 2 * sigmoid(s + float(b)) for v, s, b in zip(gated, sums, bias)]
        x, h = (x, gated) if number % 2 else (gated, h)
        number += 1
    return x, h


def layer(x, h0, c0, p, gate="capped", state_mask=None, update_mask=None):
    """All h [time, B, H] and the last c. `p`: weight_x, weight_h, bias, layer-norm gains, rounds.

    Rows of the weights are the gates j, o, f, i, H of each.
    """
    x = np.asarray(x, dtype=np.float64)
    time, batch, _ = x.shape
    hidden = len(h0[0])
    out = np.zeros((time, batch, hidden))
    last_c = np.zeros((batch, hidden))
    for b in range(batch):
        h, c = [float(v) for v in h0[b]], [float(v) for v in c0[b]]
        for t in range(time):
            kept = [
                v * (1.0 if state_mask is None else state_mask[t][b][u]) for u, v in enumerate(h)
            ]
            entering, kept = mogrify([float(v) for v in x[t][b]], kept, p)
            from_x, from_h = dot_rows(p["weight_x"], entering), dot_rows(p["weight_h"], kept)
            if "gain_x" in p:
                from_x = layer_norm(from_x, p["gain_x"])
                from_h = layer_norm(from_h, p["gain_h"])
            pre = [a + r + float(s) for a, r, s in zip(from_x, from_h, p["bias"])]
            outputs, new_c = [], []
            for u in range(hidden):
                j = math.tanh(pre[u])
                o = sigmoid(pre[hidden + u])
                f = sigmoid(pre[2 * hidden + u])
                if gate == "tied":
                    g = 1 - f
                else:
                    i = sigmoid(pre[3 * hidden + u])
                    g = min(1 - f, i) if gate == "capped" else i
                if update_mask is not None:
                    j *= update_mask[t][b][u]
                new_c.append(f * c[u] + g * j)
                outputs.append(o)
            seen = layer_norm(new_c, p["gain_c"], p["shift_c"]) if "gain_c" in p else new_c
            h = [o * math.tanh(v) for o, v in zip(outputs, seen)]
            c = new_c
            out[t][b] = h
        last_c[b] = c
    return out, last_c


def stack(x, states, layers, gate="capped", stacking="skip", masks=None):
    """Output and states. Keys of `masks`: "input", ("inter", k), ("state", k), ("update", k)."""
    masks = masks or {}
    x = np.asarray(x, dtype=np.float64) * masks.get("input", 1.0)
    hs, after, read = [], [], x
    for k, p in enumerate(layers):
        if k > 0:
            read = (sum(hs) if stacking == "residual" else hs[-1]) * masks.get(("inter", k), 1.0)
        h, c = layer(read, *states[k], p, gate, masks.get(("state", k)), masks.get(("update", k)))
        hs.append(h)
        after.append((h[-1], c))
    return (hs[-1] if stacking == "plain" else sum(hs)), after


def softmax(logits) -> list[float]:
    largest = max(logits)
    powers = [math.exp(v - largest) for v in logits]
    return [v / sum(powers) for v in powers]


def mixture_of_softmaxes(y, table, p, masks=None, temperature=1.0):
    """Log-probabilities [time, B, V]: the logarithm of a sum of probabilities, class by class.

    `temperature` divides the logits of each component.
    """
    components, size = len(p["mixture.prior"]), table.shape[1]
    z = np.array([[dot_rows(p["mixture.projection"], v) for v in step] for step in y])
    z = np.tanh(z + p["mixture.projection_bias"]) * (masks or {}).get("projection", 1.0)
    out = np.zeros((*z.shape[:2], len(table)))
    for t, step in enumerate(z):
        for b, row in enumerate(step):
            prior = softmax(dot_rows(p["mixture.prior"], y[t][b]))
            for k in range(components):
                part = np.array(dot_rows(table, row[k * size : (k + 1) * size]))
                out[t][b] += prior[k] * np.array(softmax((part + p["softmax_bias"]) / temperature))
    return np.log(out)


def language_model(tokens, states, p, layers, gate="capped", stacking="skip", masks=None, rows=""):
    """Logits [B, time, V] and states. `masks` also: "embedding" [V, 1], "output", "projection".

    With the weights of a mixture, log-probabilities in the place of logits.
    """
    masks = masks or {}
    tokens = np.asarray(tokens)
    table = np.asarray(p["embedding"], dtype=np.float64)
    dropped = table * masks.get("embedding", 1.0)
    x = np.stack([[dropped[token] for token in step] for step in tokens.T])
    y, after = stack(x, states, layers, gate, stacking, masks)
    y = y * masks.get("output", 1.0)
    table = p.get("softmax", dropped if rows == "input_and_softmax" else table)
    if "mixture.prior" in p:
        return mixture_of_softmaxes(y, table, p, masks).transpose(1, 0, 2), after
    if "projection" in p:
        y = np.array([[dot_rows(p["projection"], v) for v in step] for step in y])
        y = y * masks.get("projection", 1.0)
    logits = np.array([[dot_rows(table, v) for v in step] for step in y]) + p["softmax_bias"]
    return logits.transpose(1, 0, 2), after
