"""A row of sums over samples, class by class: log M, its peak, and its partition on a ladder.

    log M = log(mean p^α) / α, or mean log p         G(b) = log Σ_c exp(b (log M(c) − peak))

Exponentials are taken for the ladder's first octave (`family.partition_ladder`); the others are
their squares. Logarithms of classes are base 2. Parts of the classes that cannot be seen in the two
highest octaves, by the largest sum of each, are left out there.

A row is a half of the samples; with `WHOLE` the other half is `half_stride` behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.log_constants import LN2

TOGETHER: tl.constexpr = tl.constexpr(4)  # tiles of classes that are asked for together


@triton.jit
def _ask(row, half_stride, start, V, fill, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """Sums of some tiles of classes, and for the whole behind them those of the other half."""
    at = row + start + tl.arange(0, TILE)
    left = V - start - tl.arange(0, TILE)
    found = ()  # of Triton, which knows no stars in tuples
    for _ in tl.static_range(2 if WHOLE else 1):
        for part in tl.static_range(TOGETHER):
            some = tl.load(at + part * TILE, mask=left > part * TILE, other=fill)
            found = found + (some,)  # type: ignore[assignment]  # noqa: RUF005
        at += half_stride
    return found


@triton.jit
def _top(tops, tops_stride, part, BOTH: tl.constexpr):
    """The largest sum of a part of the classes, or a little more."""
    top = tl.load(tops + part)
    if BOTH:
        top += tl.load(tops + tops_stride + part)
    return top


@triton.jit
def _log2(total, mean, reference, GEOMETRIC: tl.constexpr, FAST: tl.constexpr):
    """Log2 M of sums, less `reference`; `scale` makes means of them, `drop` takes their lift off.

    `undo` is what a logarithm of sums has too much: −log2(scale · drop).
    """
    scale, drop, undo, inverse_alpha = mean
    if GEOMETRIC:
        return total * scale - reference
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
    OCTAVES: tl.constexpr,  # the lowest ones, to which classes are added
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Adds the tiles of `_ask` to the sums."""
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
    tops,  # [parts of the classes] their largest sums, or a little more
    tops_stride,  # to the same of the other half
    mean,  # what `_log2` needs
    first,  # [8] b of the first octave
    most,  # the largest sum, or a little more
    enough,  # sums below which classes do not count in the two highest octaves
    out,  # [8 · STEPS + 1 or 2, total] at this target
    total,
    WHOLE: tl.constexpr,
    BOTH: tl.constexpr,  # whether largest sums of the halves are to be added
    GEOMETRIC: tl.constexpr,
    STEPS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Stores G on all rungs, then at 1 and for the whole at 2.

    Gives the peak in log2, its class and the entropy at 1; of a half that of `most`, which is its
    peak, and nothing.
    """
    reference = _log2(most, mean, 0.0, GEOMETRIC, FAST)
    fill: tl.constexpr = -1e30 if GEOMETRIC else 0.0  # of which log M is nothing
    # Classes are the last dimension, along which threads lie: each has all rungs of a class.
    b = tl.load(first + tl.arange(0, STEPS) * (8 // STEPS))
    octaves = (tl.zeros((STEPS, TILE), tl.float32),) * 8
    zero = tl.zeros((TILE,), tl.float32)
    best = tl.full((TILE,), float("-inf"), tl.float32)
    others = (zero, zero, zero, best, tl.zeros((TILE,), tl.int32))
    last = tl.cdiv(V, PART) - 1
    top = _top(tops, tops_stride, 0, BOTH)
    ahead = _ask(row, half_stride, 0, V, fill, WHOLE, TILE)
    for start in range(0, V, TOGETHER * TILE):
        found = ahead
        few = top < enough  # not if one is no number
        after = start + TOGETHER * TILE  # those are under way meanwhile
        ahead = _ask(row, half_stride, after, V, fill, WHOLE, TILE)
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
        rungs = octave * STEPS + tl.arange(0, STEPS)
        log = tl.log2(tl.sum(octaves[octave], 1)) + b * (shift * 2**octave)
        tl.store(out + rungs * total, log * LN2)
    return peak, chosen, entropy
