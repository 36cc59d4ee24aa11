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
def _mean(at, half_stride, bias, inside, fill, scale, WHOLE: tl.constexpr, PAIRS: tl.constexpr):
    """Mean power of classes, lifted, of one half or of both; `fill` where there is no class."""
    total = tl.load(at, mask=inside, other=fill)
    if WHOLE:
        total += tl.load(at + half_stride, mask=inside, other=fill)
    total *= scale
    if PAIRS:
        total += tl.load(bias, mask=inside, other=0.0)
    return total


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
def _climb(
    row,
    half_stride,
    bias,
    V,
    fill,
    scale,
    alpha,
    inverse_alpha,
    drop,
    reference,  # log2, at the peak or a little above it
    first,  # [8] b of the first octave
    out,  # [8 · STEPS + 1 or 2, total] at this target
    total,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,  # tiles whose loads are under way together
    FAST: tl.constexpr,
):
    """Stores G on all rungs, then at 1 and for the whole at 2.

    Gives the peak in log2, its class and the entropy at 1; of a half the reference, which is its
    peak, and nothing.
    """
    # Classes are the last dimension, along which threads lie: each has all rungs of a class.
    b = tl.load(first + tl.arange(0, STEPS) * (8 // STEPS))
    s0 = tl.zeros((STEPS, TILE), tl.float32)
    s1, s2, s3, s4, s5, s6, s7 = s0, s0, s0, s0, s0, s0, s0
    one = tl.zeros((TILE,), tl.float32)
    two = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE,), tl.float32)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    where = tl.zeros((TILE,), tl.int32)
    for start in range(0, V, TILE * TOGETHER):
        for part in tl.static_range(TOGETHER):
            v = start + part * TILE + tl.arange(0, TILE)
            mean = _mean(row + v, half_stride, bias + v, v < V, fill, scale, WHOLE, PAIRS)
            below = _log2(mean, alpha, inverse_alpha, drop, FAST) - reference
            p = tl.exp2(below)
            one += p
            if WHOLE:
                two += p * p
                weighted += p * tl.maximum(below, -1e4)
                where = tl.where(mean > best, v, where)
                best = tl.maximum(mean, best)
            y = tl.exp2(b[:, None] * below[None, :])
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
    peak = reference
    entropy = 0.0
    found = 0
    z = tl.sum(one, 0)
    if WHOLE:
        highest = tl.max(best, 0)
        peak = _log2(highest, alpha, inverse_alpha, drop, FAST)
        found = tl.min(tl.where(best == highest, where, V), 0)
        entropy = (tl.log2(z) - tl.sum(weighted, 0) / z) * LN2
        log_two = tl.log2(tl.sum(two, 0)) + 2 * (reference - peak)
        tl.store(out + (8 * STEPS + 1) * total, log_two * LN2)
    shift = reference - peak
    tl.store(out + 8 * STEPS * total, (tl.log2(z) + shift) * LN2)
    _store(out, s0, b, shift, 0, STEPS, total)
    _store(out, s1, b, shift, 1, STEPS, total)
    _store(out, s2, b, shift, 2, STEPS, total)
    _store(out, s3, b, shift, 3, STEPS, total)
    _store(out, s4, b, shift, 4, STEPS, total)
    _store(out, s5, b, shift, 5, STEPS, total)
    _store(out, s6, b, shift, 6, STEPS, total)
    _store(out, s7, b, shift, 7, STEPS, total)
    return peak, found, entropy


@triton.jit
def _highest_mean(
    row,
    half_stride,
    bias,
    V,
    fill,
    scale,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        mean = _mean(row + v, half_stride, bias + v, v < V, fill, scale, WHOLE, PAIRS)
        best = tl.maximum(mean, best)
    return tl.max(best, 0)


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
    PAIRS: tl.constexpr,
    FAST: tl.constexpr,  # whether there are instructions, not an interpreter
):
    """What one alpha needs of a target: of the whole on all rungs, of a half on every fourth."""
    n = tl.program_id(0)
    a = tl.program_id(1)
    which = tl.program_id(2)  # 0 the whole, 1 and 2 its halves
    half = tl.maximum(which - 1, 0)
    power = tl.load(powers + a)
    alpha = tl.load(alphas + a)
    drop = tl.load(drops + a)
    inverse_alpha = 1 / tl.where(alpha > 0, alpha, 1.0)
    if PAIRS:
        half_stride = width.to(tl.int64)
        row = sums + n.to(tl.int64) * (2 * width) + half * half_stride
    else:
        half_stride = 6 * N.to(tl.int64) * width
        row = sums + (power * N + n).to(tl.int64) * width + half * half_stride
        part = tl.arange(0, PARTS)
        known = highest + ((5 * half + power) * N + n) * parts + part
        most = tl.max(tl.load(known, mask=part < parts, other=float("-inf")), 0)
    scale = 1 / tl.where(which == 0, 2 * size, size).to(tl.float32)
    fill = tl.where(alpha > 0, 0.0, -1e30)  # of which log M is nothing
    place = first_target + n
    if which == 0:
        # Both halves' largest sums together are at most twice the largest of the whole, unless
        # logarithms are summed. That is 1/α too high in log2, which the last rung must stand.
        last = tl.load(first + 7) * 128
        if PAIRS:  # noqa: SIM114 (known when it is compiled)
            most = _highest_mean(row, half_stride, bias, V, fill, scale, BLOCK, True, PAIRS)
        elif (power == 0) | (last * inverse_alpha > 100):
            most = _highest_mean(row, half_stride, bias, V, fill, scale, BLOCK, True, PAIRS)
        else:
            known += 5 * N * parts
            most += tl.max(tl.load(known, mask=part < parts, other=float("-inf")), 0)
            most *= scale
        peak, where, entropy = _climb(
            row,
            half_stride,
            bias,
            V,
            fill,
            scale,
            alpha,
            inverse_alpha,
            drop,
            _log2(most, alpha, inverse_alpha, drop, FAST),
            first,
            G + (a * _FINE).to(tl.int64) * total + place,
            total,
            True,
            PAIRS,
            8,
            TILE,
            4 if FAST else 1,
            FAST,
        )
        tl.store(peaks + a * total + place, peak * LN2)
        tl.store(classes + a * total + place, where)
        tl.store(entropies + a * total + place, entropy)
        if not PAIRS:  # noqa: SIM102 (known when it is compiled, unlike a)
            if a == 0:
                tl.store(spread + place, _spread(sums, half_stride, n, N, V, width, BLOCK))
    else:
        if PAIRS:
            most = _highest_mean(row, half_stride, bias, V, fill, scale, BLOCK, False, PAIRS)
        else:
            most *= scale
        peak, _, _ = _climb(
            row,
            half_stride,
            bias,
            V,
            fill,
            scale,
            alpha,
            inverse_alpha,
            drop,
            _log2(most, alpha, inverse_alpha, drop, FAST),
            first,
            G_half + (((which - 1) * A + a) * _ROUGH).to(tl.int64) * total + place,
            total,
            False,
            PAIRS,
            2,
            TILE,
            8 if FAST else 1,
            FAST,
        )
        tl.store(peaks + (which * A + a) * total + place, peak * LN2)
