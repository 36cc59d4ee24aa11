"""Log-partitions of one target from its sums over samples, by repeated squaring.

    log M = log(mean p^α) / α, or mean log p         G(b) = log Σ_c exp(b (log M(c) − peak))

G is computed at the powers b of a partition ladder (`family.partition_ladder`): exponentials for
the lowest octave, and squares of the octave below for the others. Logarithms are to base 2. The
classes are divided into parts, and parts whose largest sum is too small to show in the two highest
octaves are left out there.

A row holds the sums of one half of the samples; with `WHOLE` those of the other half follow
`half_stride` behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.log_constants import LN2

TOGETHER: tl.constexpr = tl.constexpr(4)  # tiles of classes loaded at once, to hide latency


@triton.jit
def _load_tiles(row, half_stride, start, V, fill, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Sums of `TOGETHER` tiles of classes; with `WHOLE` followed by those of the other half."""
    at = row + start + tl.arange(0, TILE)
    left = V - start - tl.arange(0, TILE)
    found = ()  # grown by +: Triton does not support starred expressions
    for _ in tl.static_range(2 if WHOLE else 1):
        for part in tl.static_range(TOGETHER):
            some = tl.load(at + part * TILE, mask=left > part * TILE, other=fill)
            found = found + (some,)  # type: ignore[assignment]  # noqa: RUF005
        at += half_stride
    return found


@triton.jit
def _top(tops, tops_stride, part, BOTH: tl.constexpr):
    """An upper bound on the sums of a part of the classes."""
    top = tl.load(tops + part)
    if BOTH:
        top += tl.load(tops + tops_stride + part)
    return top


@triton.jit
def _log2(total, mean, reference, GEOMETRIC: tl.constexpr, FAST: tl.constexpr):
    """Log2 M of sums, minus `reference`.

    `mean` is a tuple: `scale` turns sums into means, `drop` removes their lift, and
    `undo` = −log2(scale · drop) corrects the logarithm of a sum on which neither has acted.
    """
    scale, drop, undo, inverse_alpha = mean
    if GEOMETRIC:
        return total * scale - reference
    # The lift is removed before the logarithm, where float32 is finer, unless that underflows.
    small = total * (scale * drop)
    normal = small > 1e-30
    x = tl.where(normal, small, total)
    if FAST:  # one instruction with an error of 2^-22 instead of twenty of the library
        log = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        log = tl.log2(x)
    return log * inverse_alpha - tl.where(normal, reference, undo * inverse_alpha + reference)


@triton.jit
def _add(
    octaves,
    others,
    found,
    v,
    mean,
    reference,
    b,
    WHOLE: tl.constexpr,
    GEOMETRIC: tl.constexpr,
    OCTAVES: tl.constexpr,  # the number of lowest octaves to which classes are added
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Adds the tiles of `_load_tiles` to the sums."""
    one, two, weighted, best, where = others
    for part in tl.static_range(TOGETHER):
        total = found[part]
        if WHOLE:
            total += found[TOGETHER + part]
        below = _log2(total, mean, reference, GEOMETRIC, FAST)
        p = tl.exp2(below)
        one += p
        if WHOLE:
            two += p * p
            weighted += p * tl.maximum(below, -1e4)
            where = tl.where(total > best, v + part * TILE, where)
            best = tl.maximum(total, best)
        y = tl.exp2(b[:, None] * below[None, :])
        higher = ()
        for octave in tl.static_range(8):
            own = octaves[octave]
            if octave < OCTAVES:
                own += y
                y *= y
            higher = higher + (own,)  # type: ignore[assignment]  # noqa: RUF005
        octaves = higher
    return octaves, (one, two, weighted, best, where)


@triton.jit
def row_partitions(
    row,
    half_stride,
    V,
    tops,  # [parts] upper bounds on the sums of each part of the classes
    tops_stride,  # to those of the other half
    mean,  # see `_log2`
    first,  # [8] b of the first octave
    most,  # an upper bound on all sums
    enough,  # classes with smaller sums do not count in the two highest octaves
    out,  # [8 · STEPS + 1 or 2, total] at this target
    total,
    WHOLE: tl.constexpr,
    BOTH: tl.constexpr,  # whether to add the bounds of both halves
    GEOMETRIC: tl.constexpr,
    STEPS: tl.constexpr,  # powers per octave: 8, or 2 for halves
    PART: tl.constexpr,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Stores G at all powers, then at b = 1, and for the whole at b = 2.

    Returns log2 of the peak, its class and the entropy at b = 1. For a half, `most` is exact and
    gives the peak; class and entropy are 0.
    """
    reference = _log2(most, mean, 0.0, GEOMETRIC, FAST)
    fill: tl.constexpr = -1e30 if GEOMETRIC else 0.0  # a sum that adds nothing to G
    # Classes are the last dimension, along which threads lie: each holds all powers of a class.
    b = tl.load(first + tl.arange(0, STEPS) * (8 // STEPS))
    octaves = (tl.zeros((STEPS, TILE), tl.float32),) * 8
    zero = tl.zeros((TILE,), tl.float32)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    others = (zero, zero, zero, best, tl.zeros((TILE,), tl.int32))
    last = tl.cdiv(V, PART) - 1
    top = _top(tops, tops_stride, 0, BOTH)
    ahead = _load_tiles(row, half_stride, 0, V, fill, WHOLE, TILE)
    for start in range(0, V, TOGETHER * TILE):
        found = ahead
        few = top < enough  # false for NaN
        after = start + TOGETHER * TILE  # loaded while the current tiles are summed
        ahead = _load_tiles(row, half_stride, after, V, fill, WHOLE, TILE)
        top = _top(tops, tops_stride, tl.minimum(after // PART, last), BOTH)
        v = start + tl.arange(0, TILE)
        given = octaves, others, found, v, mean, reference, b
        if few:
            octaves, others = _add(*given, WHOLE, GEOMETRIC, 6, TILE, FAST)
        else:
            octaves, others = _add(*given, WHOLE, GEOMETRIC, 8, TILE, FAST)
    one, two, weighted, best, where = others
    peak = reference
    entropy = 0.0
    chosen = 0
    z = tl.sum(one, 0)
    if WHOLE:
        highest = tl.max(best, 0)
        peak = _log2(highest, mean, 0.0, GEOMETRIC, FAST)
        chosen = tl.min(tl.where(best == highest, where, V), 0)
        entropy = (tl.log2(z) - tl.sum(weighted, 0) / z) * LN2
        log_two = tl.log2(tl.sum(two, 0)) + 2 * (reference - peak)
        tl.store(out + (8 * STEPS + 1) * total, log_two * LN2)
    shift = reference - peak
    tl.store(out + 8 * STEPS * total, (tl.log2(z) + shift) * LN2)
    for octave in tl.static_range(8):
        powers = octave * STEPS + tl.arange(0, STEPS)
        log = tl.log2(tl.sum(octaves[octave], 1)) + b * (shift * 2**octave)
        tl.store(out + powers * total, log * LN2)
    return peak, chosen, entropy
