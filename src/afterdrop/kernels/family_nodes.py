"""From sums over samples to the family: log M, its peak, and its partition on a ladder.

    log M = log(mean p^α) / α, or mean log p         G(b) = log Σ_c exp(b (log M(c) − peak))

Exponentials are taken for the ladder's first octave (`family.ladder`); the others are their
squares. Logarithms of classes are base 2.

Letters: N targets, V classes, A alphas, b = 1/T; sums as `sample_sums` leaves them, or in their
place logits of the mean features of both halves (`PAIRS`), for which log M is their mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.family.ladder import EVERY, OCTAVES, STEPS
from afterdrop.kernels.bases import LN2, LOG2E
from afterdrop.kernels.sample_sums import LIFT

_FINE: tl.constexpr = tl.constexpr(OCTAVES * STEPS + 2)  # values of the whole
_ROUGH: tl.constexpr = tl.constexpr(OCTAVES * STEPS // EVERY + 1)  # and of a half


@triton.jit
def _means(at, half_stride, bias, inside, fill, scale, PAIRS: tl.constexpr):
    """Mean powers of classes, lifted, of the whole and its halves; `fill` where there is none."""
    first = tl.load(at, mask=inside, other=fill) * scale
    second = tl.load(at + half_stride, mask=inside, other=fill) * scale
    if PAIRS:
        own = tl.load(bias, mask=inside, other=0.0)
        first += own
        second += own
    return (first + second) * 0.5, first, second


@triton.jit
def _log2(mean, alpha, inverse_alpha, drop, FAST: tl.constexpr):
    """Log2 M of a mean power."""
    # The lift is taken off before the logarithm, which is finer there, where that is a number.
    small = mean * drop
    normal = small > 1e-30
    x = tl.where(normal, small, mean)
    if FAST:  # one instruction with an error of 2^-22, for a library's twenty
        log = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log = tl.log2(x)
    log -= tl.where(normal, 0.0, LIFT * alpha)
    return tl.where(alpha > 0, log * inverse_alpha, mean * LOG2E)


@triton.jit
def _store(at, sums, b, shift, octave: tl.constexpr, STEPS: tl.constexpr, total):
    """The logarithms of an octave's sums, relative to what is `shift` below their reference."""
    rungs = octave * STEPS + tl.arange(0, STEPS)
    log = tl.log2(tl.sum(sums, 1)) + b * (shift * 2**octave)
    tl.store(at + rungs * total, log * LN2)


@triton.jit
def _add_octaves(y, s0, s1, s2, s3, s4, s5, s6, s7):
    """Adds powers of the first octave and their squares, octave after octave."""
    s0 += y
    y *= y
    s1 += y
    y *= y
    s2 += y
    y *= y
    s3 += y
    y *= y
    s4 += y
    y *= y
    s5 += y
    y *= y
    s6 += y
    y *= y
    s7 += y
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def _store_octaves(at, s0, s1, s2, s3, s4, s5, s6, s7, one, b, shift, STEPS: tl.constexpr, total):
    """Stores G on all rungs, then at 1; gives Σ M there, relative to the reference."""
    z = tl.sum(one, 0)
    tl.store(at + 8 * STEPS * total, (tl.log2(z) + shift) * LN2)
    _store(at, s0, b, shift, 0, STEPS, total)
    _store(at, s1, b, shift, 1, STEPS, total)
    _store(at, s2, b, shift, 2, STEPS, total)
    _store(at, s3, b, shift, 3, STEPS, total)
    _store(at, s4, b, shift, 4, STEPS, total)
    _store(at, s5, b, shift, 5, STEPS, total)
    _store(at, s6, b, shift, 6, STEPS, total)
    _store(at, s7, b, shift, 7, STEPS, total)
    return z


@triton.jit
def _highest_means(
    row, half_stride, bias, V, fill, scale, BLOCK: tl.constexpr, PAIRS: tl.constexpr
):
    whole = tl.full((BLOCK,), float("-inf"), tl.float32)
    first, second = whole, whole
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        means = _means(row + v, half_stride, bias + v, v < V, fill, scale, PAIRS)
        whole = tl.maximum(means[0], whole)
        first = tl.maximum(means[1], first)
        second = tl.maximum(means[2], second)
    return tl.max(whole, 0), tl.max(first, 0), tl.max(second, 0)


@triton.jit
def _spread(sums, half_stride, n, N, V, width, BLOCK: tl.constexpr):
    """Σ_c Σ_k p² / Σ_k p − 1."""
    p_row = sums + (4 * N + n).to(tl.int64) * width
    q_row = p_row + N.to(tl.int64) * width
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
    return tl.sum(ratio, 0) - 1


@triton.jit(do_not_specialize=["N", "first_target", "total"])
def family_nodes(
    sums,  # [2, 6, N, width], or logits [N, 2, width]
    highest,  # [2, 5, N, parts] the largest sum of a part of the classes; not read with logits
    powers,
    alphas,
    drops,  # [A] 2^(−96 α), which undoes the lift
    first,  # [8] b of the first octave
    G,  # [A, rungs and 1 and 2, total]
    G_half,  # [2, A, every fourth rung and 1, total]
    peaks,
    classes,
    entropies,
    spread,
    N,  # targets of this chunk
    V,
    width,
    A,
    size,
    first_target,  # the chunk's first target among all
    total,  # targets of all chunks
    bias,  # [V] that logits lack; not read with sums
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,  # tiles whose loads are under way together
    PAIRS: tl.constexpr,
    FAST: tl.constexpr,  # whether there are instructions, not an interpreter
):
    """What one alpha needs of a target: of the whole on all rungs, of a half on every fourth."""
    n = tl.program_id(0)
    a = tl.program_id(1)
    power = tl.load(powers + a)
    alpha = tl.load(alphas + a)
    drop = tl.load(drops + a)
    inverse_alpha = 1 / tl.where(alpha > 0, alpha, 1.0)
    scale = 1 / size.to(tl.float32)
    fill = tl.where(alpha > 0, 0.0, -1e30)  # of which log M is nothing
    if PAIRS:
        half_stride = width.to(tl.int64)
        row = sums + n.to(tl.int64) * (2 * width)
        mosts = _highest_means(row, half_stride, bias, V, fill, scale, BLOCK, PAIRS)
    else:
        half_stride = 6 * N.to(tl.int64) * width
        row = sums + (power * N + n).to(tl.int64) * width
        # Both halves' largest means together are at most twice the largest of the whole, unless
        # logarithms are summed. That is 1/α too high in log2, which the last rung must stand.
        if (power == 0) | (tl.load(first + 7) * 128 * inverse_alpha > 100):
            mosts = _highest_means(row, half_stride, bias, V, fill, scale, BLOCK, PAIRS)
        else:
            part = tl.arange(0, PARTS)
            at = highest + (power * N + n) * parts + part
            known = tl.load(at, mask=part < parts, other=float("-inf"))
            one = tl.max(known, 0) * scale
            known = tl.load(at + 5 * N * parts, mask=part < parts, other=float("-inf"))
            two = tl.max(known, 0) * scale
            mosts = (one + two) * 0.5, one, two
    reference = _log2(mosts[0], alpha, inverse_alpha, drop, FAST)
    peak_first = _log2(mosts[1], alpha, inverse_alpha, drop, FAST)
    peak_second = _log2(mosts[2], alpha, inverse_alpha, drop, FAST)
    # Classes are the last dimension, along which threads lie: each has all rungs of a class.
    b = tl.load(first + tl.arange(0, 8))
    b_half = tl.load(first + tl.arange(0, 2) * 4)
    s0 = tl.zeros((8, TILE), tl.float32)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    t0 = tl.zeros((2, TILE), tl.float32)
    t1, t2, t3, t4, t5, t6, t7 = t0, t0, t0, t0, t0, t0, t0
    u0, u1, u2, u3, u4, u5, u6, u7 = t0, t0, t0, t0, t0, t0, t0, t0
    one = tl.zeros((TILE,), tl.float32)
    one_first, one_second, two, weighted = one, one, one, one
    best = tl.full((TILE,), float("-inf"), tl.float32)
    where = tl.zeros((TILE,), tl.int32)
    for start in range(0, V, TILE * TOGETHER):
        for step in tl.static_range(TOGETHER):
            v = start + step * TILE + tl.arange(0, TILE)
            whole, left, right = _means(row + v, half_stride, bias + v, v < V, fill, scale, PAIRS)
            where = tl.where(whole > best, v, where)
            best = tl.maximum(whole, best)
            below = _log2(whole, alpha, inverse_alpha, drop, FAST) - reference
            p = tl.exp2(below)
            one += p
            two += p * p
            weighted += p * tl.maximum(below, -1e4)
            y = tl.exp2(b[:, None] * below[None, :])
            s0, s1, s2, s3, s4, s5, s6, s7 = _add_octaves(y, s0, s1, s2, s3, s4, s5, s6, s7)
            below = _log2(left, alpha, inverse_alpha, drop, FAST) - peak_first
            one_first += tl.exp2(below)
            y = tl.exp2(b_half[:, None] * below[None, :])
            t0, t1, t2, t3, t4, t5, t6, t7 = _add_octaves(y, t0, t1, t2, t3, t4, t5, t6, t7)
            below = _log2(right, alpha, inverse_alpha, drop, FAST) - peak_second
            one_second += tl.exp2(below)
            y = tl.exp2(b_half[:, None] * below[None, :])
            u0, u1, u2, u3, u4, u5, u6, u7 = _add_octaves(y, u0, u1, u2, u3, u4, u5, u6, u7)
    highest_mean = tl.max(best, 0)
    peak = _log2(highest_mean, alpha, inverse_alpha, drop, FAST)
    shift = reference - peak
    place = first_target + n
    at = G + (a * _FINE).to(tl.int64) * total + place
    z = _store_octaves(at, s0, s1, s2, s3, s4, s5, s6, s7, one, b, shift, 8, total)
    tl.store(at + (_FINE - 1) * total, (tl.log2(tl.sum(two, 0)) + 2 * shift) * LN2)
    at = G_half + (a * _ROUGH).to(tl.int64) * total + place
    _store_octaves(at, t0, t1, t2, t3, t4, t5, t6, t7, one_first, b_half, 0.0, 2, total)
    at += (A * _ROUGH).to(tl.int64) * total
    _store_octaves(at, u0, u1, u2, u3, u4, u5, u6, u7, one_second, b_half, 0.0, 2, total)
    tl.store(peaks + a * total + place, peak * LN2)
    tl.store(peaks + (A + a) * total + place, peak_first * LN2)
    tl.store(peaks + (2 * A + a) * total + place, peak_second * LN2)
    tl.store(classes + a * total + place, tl.min(tl.where(best == highest_mean, where, V), 0))
    entropy = (tl.log2(z) - tl.sum(weighted, 0) / z) * LN2
    tl.store(entropies + a * total + place, entropy)
    if not PAIRS:  # noqa: SIM102 (known when it is compiled, unlike a)
        if a == A - 1:
            tl.store(spread + place, _spread(sums, half_stride, n, N, V, width, BLOCK))
