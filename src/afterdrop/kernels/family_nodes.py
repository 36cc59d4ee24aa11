"""From sums over samples to the family: log M, its peak, and its partition at nodes of temperature.

    log M = log(mean p^α) / α, or mean log p         G(b) = log Σ_c exp(b (log M(c) − peak))

Letters: N targets, V classes, A alphas, b = 1/T; sums as `sample_sums` leaves them, or in their
place logits of the mean features of both halves (`PAIRS`), for which log M is their mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.sample_sums import LIFT

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _log_mean(
    at, half_stride, whole, inside, count, alpha, inverse_alpha, drop, bias, PAIRS: tl.constexpr
):
    """Log M of classes, of one half or of both."""
    total = tl.load(at, mask=inside, other=0.0)
    if whole:
        total += tl.load(at + half_stride, mask=inside, other=0.0)
    mean = tl.where(inside, total / count, 1.0)
    if alpha > 0:
        # The lift is taken off before the logarithm, which is finer there, where that is a number.
        small = mean * drop
        normal = small > 1e-30
        lifted = tl.log(tl.where(normal, small, mean))
        mean = tl.where(normal, lifted, lifted - (LIFT / _LOG2E) * alpha) * inverse_alpha
    if PAIRS:
        mean += tl.load(bias, mask=inside, other=0.0)
    return tl.where(inside, mean, -1e30)


@triton.jit
def _nodes(inverse, index, COUNT: tl.constexpr):
    """Inverse temperatures times log2 e."""
    return tl.load(inverse + index, mask=index < COUNT, other=1.0) * _LOG2E


@triton.jit(do_not_specialize=["N", "first", "total"])
def family_nodes(
    sums,
    powers,
    alphas,
    drops,  # [A] 2^(−96 α), which undoes the lift
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
    bias,  # [V] that logits lack; not read with sums
    stride,  # of the logits [N, 2, V₊]
    FINE: tl.constexpr,
    COARSE: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """What one alpha needs of a target: of the whole at fine nodes, of a half at coarse ones."""
    n = tl.program_id(0)
    a = tl.program_id(1)
    which = tl.program_id(2)  # 0 the whole, 1 and 2 its halves
    power = tl.load(powers + a)
    alpha = tl.load(alphas + a)
    drop = tl.load(drops + a)
    inverse_alpha = 1 / tl.where(alpha > 0, alpha, 1.0)
    if PAIRS:
        half_stride = stride
        row = sums + n.to(tl.int64) * (2 * stride) + tl.maximum(which - 1, 0) * half_stride
    else:
        half_stride = 6 * N.to(tl.int64) * V
        row = sums + (power * N + n).to(tl.int64) * V + tl.maximum(which - 1, 0) * half_stride
    count = tl.where(which == 0, 2 * size, size).to(tl.float32)
    best = tl.full((BLOCK,), -1e30, tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        lm = _log_mean(
            row + v,
            half_stride,
            which == 0,
            v < V,
            count,
            alpha,
            inverse_alpha,
            drop,
            bias + v,
            PAIRS,
        )
        where = tl.where(lm > best, v, where)
        best = tl.maximum(lm, best)
    peak = tl.max(best, 0)
    place = first + n
    tl.store(peaks + (which * A + a) * total + place, peak)
    # Nodes in groups of powers of two. Classes are the last dimension, along which threads lie:
    # each takes one logarithm and all nodes of a class.
    small = tl.arange(0, 8)
    least = tl.arange(0, 4)
    sum_b = tl.zeros((8, TILE), tl.float32)
    sum_c = tl.zeros((4, TILE), tl.float32)
    if which == 0:
        tl.store(classes + a * total + place, tl.min(tl.where(best == peak, where, V), 0))
        large = tl.arange(0, 32)
        b_a, b_b = _nodes(fine, large, FINE), _nodes(fine, 32 + small, FINE)
        b_c = _nodes(fine, 40 + least, FINE)
        sum_a = tl.zeros((32, TILE), tl.float32)
        weighted = tl.zeros((TILE,), tl.float32)
        for start in range(0, V, TILE):
            v = start + tl.arange(0, TILE)
            lm = _log_mean(
                row + v,
                half_stride,
                True,
                v < V,
                count,
                alpha,
                inverse_alpha,
                drop,
                bias + v,
                PAIRS,
            )
            below = lm - peak
            sum_a += tl.exp2(b_a[:, None] * below[None, :])
            sum_b += tl.exp2(b_b[:, None] * below[None, :])
            sum_c += tl.exp2(b_c[:, None] * below[None, :])
            weighted += tl.exp(below) * tl.maximum(below, -1e4)
        g_c = tl.log(tl.sum(sum_c, 1))
        at = G + (a * FINE).to(tl.int64) * total + place
        tl.store(at + large * total, tl.log(tl.sum(sum_a, 1)), mask=large < FINE)
        tl.store(at + (32 + small) * total, tl.log(tl.sum(sum_b, 1)), mask=32 + small < FINE)
        tl.store(at + (40 + least) * total, g_c, mask=40 + least < FINE)
        # Entropy at b = 1: L(1) − Σ p log M, both from the peak.
        log_z = tl.sum(tl.where(40 + least == ONE, g_c, 0.0), 0)
        tl.store(entropies + a * total + place, log_z - tl.sum(weighted, 0) * tl.exp(-log_z))
        if not PAIRS:  # noqa: SIM102 (known when it is compiled, unlike a)
            if a == 0:
                p_row = sums + (4 * N + n).to(tl.int64) * V
                q_row = p_row + N.to(tl.int64) * V
                ratio = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, V, BLOCK):
                    v = start + tl.arange(0, BLOCK)
                    inside = v < V
                    p = tl.load(p_row + v, mask=inside, other=0.0)
                    p += tl.load(p_row + half_stride + v, mask=inside, other=0.0)
                    p *= 1.0 / 2**LIFT
                    q = tl.load(q_row + v, mask=inside, other=0.0)
                    q += tl.load(q_row + half_stride + v, mask=inside, other=0.0)
                    ratio += tl.where(p > 0, q / tl.where(p > 0, p, 1.0), 0.0)
                tl.store(spread + place, tl.sum(ratio, 0) - 1)
    else:
        b_b, b_c = _nodes(coarse, small, COARSE), _nodes(coarse, 8 + least, COARSE)
        for start in range(0, V, TILE):
            v = start + tl.arange(0, TILE)
            lm = _log_mean(
                row + v,
                half_stride,
                False,
                v < V,
                count,
                alpha,
                inverse_alpha,
                drop,
                bias + v,
                PAIRS,
            )
            below = lm - peak
            sum_b += tl.exp2(b_b[:, None] * below[None, :])
            sum_c += tl.exp2(b_c[:, None] * below[None, :])
        at = G_half + (((which - 1) * A + a) * COARSE).to(tl.int64) * total + place
        tl.store(at + small * total, tl.log(tl.sum(sum_b, 1)), mask=small < COARSE)
        tl.store(at + (8 + least) * total, tl.log(tl.sum(sum_c, 1)), mask=8 + least < COARSE)
