"""The paper's equations restated in float64 NumPy, independent of `afterdrop`.

Legend: K samples, N targets, V classes. `lp` is log p_k(c), [K, N, V]; `w` the weights of the
samples (uniform, or the probabilities of all masks of an enumeration).
"""

import itertools

import numpy as np
from scipy.optimize import minimize_scalar


def log_sum_exp(x, axis, weights=None):
    with np.errstate(divide="ignore", invalid="ignore"):
        peak = np.max(x, axis=axis, keepdims=True)
        peak = np.where(np.isfinite(peak), peak, 0.0)
        terms = np.exp(x - peak)
        if weights is not None:
            terms = terms * weights
        return np.log(terms.sum(axis=axis)) + np.squeeze(peak, axis)


def log_softmax(x):
    x = np.asarray(x, dtype=np.float64)
    return x - log_sum_exp(x, -1)[..., None]


def _weights(lp, w):
    w = np.full(len(lp), 1.0 / len(lp)) if w is None else np.asarray(w, dtype=np.float64)
    return w.reshape(-1, *[1] * (lp.ndim - 1))


def log_power_mean(lp, alpha, w=None):
    """Over axis 0; below alpha 1e-3 relative to the mean of log p, where the plain form cancels."""
    lp = np.asarray(lp, dtype=np.float64)
    w = _weights(lp, w)
    if alpha == 0:
        return (lp * w).sum(0)
    if abs(alpha) < 1e-3 and np.isfinite(lp).all():
        mean = (lp * w).sum(0)
        centred = lp - mean
        return mean + np.log1p((w * np.expm1(alpha * centred)).sum(0)) / alpha
    return log_sum_exp(alpha * lp, 0, w) / alpha


def member_log_probs(lp, alpha, temperature=1.0, temper="mean", w=None):
    """[N, V] log-probabilities of a member."""
    lp = np.asarray(lp, dtype=np.float64)
    if temper == "sample":
        return log_softmax(log_power_mean(log_softmax(lp / temperature), alpha, w))
    return log_softmax(log_power_mean(lp, alpha, w) / temperature)


def at(log_probs, targets):
    return np.take_along_axis(
        log_probs, np.broadcast_to(targets, log_probs.shape[:-1])[..., None], -1
    )[..., 0]


def decomposition(lp, targets, alpha, w=None):
    """Per target: objective, bound D, Jensen gap, normaliser gap (T = 1)."""
    log_mean = log_power_mean(lp, alpha, w)
    log_z = log_sum_exp(log_mean, -1)
    own = at(lp, targets)
    bound = (own * _weights(own, w)).sum(0)
    return at(log_mean, targets) - log_z, bound, at(log_mean, targets) - bound, -log_z


def best_temperature(cross_entropy, low, high):
    """The minimiser of XE(T) in log T to 1e-9, given XE as a function of T."""
    starts = np.linspace(np.log(low), np.log(high), 81)
    best = starts[int(np.argmin([cross_entropy(np.exp(s)) for s in starts]))]
    step = starts[1] - starts[0]
    found = minimize_scalar(
        lambda s: cross_entropy(np.exp(s)),
        bounds=(max(best - step, starts[0]), min(best + step, starts[-1])),
        method="bounded",
        options={"xatol": 1e-10, "maxiter": 500},
    )
    return float(np.exp(found.x))


def temperature_root(log_means, targets, low, high):
    """The root of dXE/db by bisection in float64; exact where XE is convex in b = 1/T."""
    own = at(log_means, targets)

    def slope(b):
        p = np.exp(log_softmax(b * log_means))
        with np.errstate(invalid="ignore"):
            mean = np.where(p > 0, p * log_means, 0.0).sum(-1)
        return (mean - own).mean()

    a, b = np.log(1 / high), np.log(1 / low)
    if slope(np.exp(a)) >= 0 or slope(np.exp(b)) <= 0:
        return None
    for _ in range(100):
        middle = (a + b) / 2
        a, b = (a, middle) if slope(np.exp(middle)) > 0 else (middle, b)
    return float(np.exp(-(a + b) / 2))


def entropy(log_p):
    with np.errstate(invalid="ignore"):
        return -np.where(np.isfinite(log_p), np.exp(log_p) * log_p, 0.0).sum(-1)


def brier(log_p, targets):
    p = np.exp(log_p)
    hot = np.eye(p.shape[-1])[targets]
    return ((p - hot) ** 2).sum(-1)


def ece_width(confidence, correct, bins):
    total = 0.0
    for i in range(bins):
        inside = (confidence > i / bins) & (confidence <= (i + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return total


def ece_mass(confidence, correct, bins):
    order = np.argsort(confidence, kind="stable")
    edges = [int(np.ceil(i * len(order) / bins)) for i in range(bins + 1)]
    total = 0.0
    for a, b in itertools.pairwise(edges):
        part = order[a:b]
        if len(part):
            gap = abs(correct[part].mean() - confidence[part].mean())
            total += len(part) / len(order) * gap
    return total


def clustered_error(values, clusters):
    """Cluster-robust standard error of a mean, by a loop."""
    mean, names = values.mean(), np.unique(clusters)
    sums = np.array([(values[clusters == name] - mean).sum() for name in names])
    g = len(names)
    return np.sqrt(g / (g - 1) * (sums**2).sum()) / len(values)


def all_masks(units):
    """All masks [2^units, units] of zeros and ones."""
    return np.array(list(itertools.product((0.0, 1.0), repeat=units)))


def enumerate_mlp(x, first, second, rate, activation=np.tanh):
    """All masks of one hidden layer: lp [2^H, N, V] and the probabilities of the masks.

    `first` and `second` are (weight, bias) as nn.Linear holds them.
    """
    (w1, b1), (w2, b2) = first, second
    hidden = activation(x @ w1.T + b1)
    masks = all_masks(hidden.shape[1])
    kept = masks.sum(1)
    prob = (1 - rate) ** kept * rate ** (masks.shape[1] - kept)
    dropped = hidden[None] * masks[:, None] / (1 - rate)
    return log_softmax(dropped @ w2.T + b2), prob
