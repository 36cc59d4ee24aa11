"""From sums over samples to the family: log M, its peak, and its partition at nodes of temperature.

    log M = log(mean p^α) / α, or mean log p         G(b) = log Σ_c exp(b (log M(c) − peak))

Letters: N targets, V classes, A alphas, b = 1/T; sums as `sample_sums` leaves them.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _log_mean(at, half_stride, whole, inside, count, alpha, inverse_alpha):
    """Log M of classes, of one half or of both."""
    total = tl.load(at, mask=inside, other=0.0)
    if whole:
        total += tl.load(at + half_stride, mask=inside, other=0.0)
    mean = tl.where(inside, total / count, 1.0)
    if alpha > 0:
        mean = tl.log(mean) * inverse_alpha
    return tl.where(inside, mean, -1e30)


@triton.jit(do_not_specialize=["N", "first", "total"])
def family_nodes(
    sums,
    powers,
    alphas,
    fine,
    coarse,
    G,
    G_half,
    peaks,
    classes,
    entropies,
    spread,
    N,  # targets of this chunk
    V,
    A,
    size,
    first,  # the chunk's first target among all
    total,  # targets of all chunks
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    ONE: tl.constexpr,
    NODES_A: tl.constexpr,
    NODES_B: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """What one alpha needs of a target: of the whole at fine nodes, of a half at coarse ones."""
    n = tl.program_id(0)
    a = tl.program_id(1)
    which = tl.program_id(2)  # 0 the whole, 1 and 2 its halves
    power = tl.load(powers + a)
    alpha = tl.load(alphas + a)
    inverse_alpha = 1 / tl.where(alpha > 0, alpha, 1.0)
    half_stride = 6 * N.to(tl.int64) * V
    row = sums + (power * N + n).to(tl.int64) * V + tl.maximum(which - 1, 0) * half_stride
    count = tl.where(which == 0, 2 * size, size).to(tl.float32)
    best = tl.full((BLOCK,), -1e30, tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        lm = _log_mean(row + v, half_stride, which == 0, v < V, count, alpha, inverse_alpha)
        where = tl.where(lm > best, v, where)
        best = tl.maximum(lm, best)
    peak = tl.max(best, 0)
    place = first + n
    tl.store(peaks + (which * A + a) * total + place, peak)
    node_b = tl.arange(0, NODES_B)
    if which == 0:
        tl.store(classes + a * total + place, tl.min(tl.where(best == peak, where, V), 0))
        node_a = tl.arange(0, NODES_A)
        b_a = tl.load(fine + node_a, mask=node_a < FINE, other=1.0) * _LOG2E
        b_b = tl.load(fine + NODES_A + node_b, mask=NODES_A + node_b < FINE, other=1.0) * _LOG2E
        # Classes are the last dimension, along which threads lie: each takes one logarithm and
        # all nodes of a class.
        sum_a = tl.zeros((NODES_A, TILE), tl.float32)
        sum_b = tl.zeros((NODES_B, TILE), tl.float32)
        weighted = tl.zeros((TILE,), tl.float32)
        for start in range(0, V, TILE):
            v = start + tl.arange(0, TILE)
            lm = _log_mean(row + v, half_stride, True, v < V, count, alpha, inverse_alpha)
            below = lm - peak
            sum_a += tl.exp2(b_a[:, None] * below[None, :])
            sum_b += tl.exp2(b_b[:, None] * below[None, :])
            weighted += tl.exp(below) * tl.maximum(below, -1e4)
        g_a = tl.log(tl.sum(sum_a, 1))
        g_b = tl.log(tl.sum(sum_b, 1))
        at = G + (a * FINE).to(tl.int64) * total + place
        tl.store(at + node_a * total, g_a, mask=node_a < FINE)
        tl.store(at + (NODES_A + node_b) * total, g_b, mask=NODES_A + node_b < FINE)
        # Entropy at b = 1: L(1) − Σ p log M, both from the peak.
        log_z = tl.sum(tl.where(NODES_A + node_b == ONE, g_b, 0.0), 0)
        tl.store(entropies + a * total + place, log_z - tl.sum(weighted, 0) * tl.exp(-log_z))
        if a == 0:
            p_row = sums + (4 * N + n).to(tl.int64) * V
            q_row = p_row + N.to(tl.int64) * V
            ratio = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, V, BLOCK):
                v = start + tl.arange(0, BLOCK)
                inside = v < V
                p = tl.load(p_row + v, mask=inside, other=0.0)
                p += tl.load(p_row + half_stride + v, mask=inside, other=0.0)
                q = tl.load(q_row + v, mask=inside, other=0.0)
                q += tl.load(q_row + half_stride + v, mask=inside, other=0.0)
                ratio += tl.where(p > 0, q / tl.where(p > 0, p, 1.0), 0.0)
            tl.store(spread + place, tl.sum(ratio, 0) - 1)
    else:
        b_b = tl.load(coarse + node_b, mask=node_b < COARSE, other=1.0) * _LOG2E
        sum_b = tl.zeros((NODES_B, TILE), tl.float32)
        for start in range(0, V, TILE):
            v = start + tl.arange(0, TILE)
            lm = _log_mean(row + v, half_stride, False, v < V, count, alpha, inverse_alpha)
            sum_b += tl.exp2(b_b[:, None] * (lm - peak)[None, :])
        at = G_half + (((which - 1) * A + a) * COARSE).to(tl.int64) * total + place
        tl.store(at + node_b * total, tl.log(tl.sum(sum_b, 1)), mask=node_b < COARSE)
