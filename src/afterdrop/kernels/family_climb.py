"""A row of sums over samples, class by class: log M, its peak, and its partition on a ladder.

    log M = log(mean p^α) / α, or mean log p         G(b) = log Σ_c exp(b (log M(c) − peak))

Exponentials are taken for the ladder's first octave (`family.ladder`); the others are their
squares. Logarithms of classes are base 2.

A row is a half of the samples; with `WHOLE` the other half is `half_stride` behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.bases import LN2


@triton.jit
def _sums(at, half_stride, inside, fill, WHOLE: tl.constexpr):
    """Sums of classes, of one half or of both; `fill` where there is no class."""
    total = tl.load(at, mask=inside, other=fill)
    if WHOLE:
        total += tl.load(at + half_stride, mask=inside, other=fill)
    return total


@triton.jit
def _log2(total, scale, drop, undo, inverse_alpha, GEOMETRIC: tl.constexpr, FAST: tl.constexpr):
    """Log2 M of sums, of which `scale` makes means and `drop` takes their lift off.

    `undo` is what a logarithm of sums has too much: −log2(scale · drop).
    """
    if GEOMETRIC:
        return total * scale
    # The lift is taken off before the logarithm, which is finer there, where that is a number.
    small = total * (scale * drop)
    normal = small > 1e-30
    x = tl.where(normal, small, total)
    if FAST:  # one instruction with an error of 2^-22, for a library's twenty
        log = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log = tl.log2(x)
    return (log - tl.where(normal, 0.0, undo)) * inverse_alpha


@triton.jit
def _store(at, sums, b, shift, octave: tl.constexpr, STEPS: tl.constexpr, total):
    """The logarithms of an octave's sums, relative to what is `shift` below their reference."""
    rungs = octave * STEPS + tl.arange(0, STEPS)
    log = tl.log2(tl.sum(sums, 1)) + b * (shift * 2**octave)
    tl.store(at + rungs * total, log * LN2)


@triton.jit
def climb(
    row,
    half_stride,
    V,
    most,  # the largest sum, or a little more
    scale,
    drop,
    undo,
    inverse_alpha,
    first,  # [8] b of the first octave
    out,  # [8 · STEPS + 1 or 2, total] at this target
    total,
    WHOLE: tl.constexpr,
    GEOMETRIC: tl.constexpr,
    STEPS: tl.constexpr,
    TILE: tl.constexpr,
    TOGETHER: tl.constexpr,  # tiles whose loads are under way together
    FAST: tl.constexpr,
):
    """Stores G on all rungs, then at 1 and for the whole at 2.

    Gives the peak in log2, its class and the entropy at 1; of a half that of `most`, which is its
    peak, and nothing.
    """
    reference = _log2(most, scale, drop, undo, inverse_alpha, GEOMETRIC, FAST)
    fill: tl.constexpr = -1e30 if GEOMETRIC else 0.0  # of which log M is nothing
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
            total_v = _sums(row + v, half_stride, v < V, fill, WHOLE)
            below = _log2(total_v, scale, drop, undo, inverse_alpha, GEOMETRIC, FAST) - reference
            p = tl.exp2(below)
            one += p
            if WHOLE:
                two += p * p
                weighted += p * tl.maximum(below, -1e4)
                where = tl.where(total_v > best, v, where)
                best = tl.maximum(total_v, best)
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
        peak = _log2(highest, scale, drop, undo, inverse_alpha, GEOMETRIC, FAST)
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
def largest(row, half_stride, V, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """The largest sum."""
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        best = tl.maximum(_sums(row + v, half_stride, v < V, float("-inf"), WHOLE), best)
    return tl.max(best, 0)
