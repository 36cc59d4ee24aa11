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
def _total(at, half_stride, inside, fill, WHOLE: tl.constexpr):
    """Sums of classes, of one half or of both; `fill` where there is no class."""
    total = tl.load(at, mask=inside, other=fill)
    if WHOLE:
        total += tl.load(at + half_stride, mask=inside, other=fill)
    return total


@triton.jit
def _log2(total, scale, drop, lift, inverse_alpha, GEOMETRIC: tl.constexpr, FAST: tl.constexpr):
    """Log2 M of sums, of which `scale` makes means and `drop` takes their lift off.

    `lift` is what both do to a logarithm: −log2(scale · drop).
    """
    if GEOMETRIC:
        return total * (scale * LOG2E)
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
    return (log - tl.where(normal, 0.0, lift)) * inverse_alpha


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
    V,
    most,  # the largest sum, or a little more
    scale,
    drop,
    lift,
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
    reference = _log2(most, scale, drop, lift, inverse_alpha, GEOMETRIC, FAST)
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
            total_v = _total(row + v, half_stride, v < V, fill, WHOLE)
            below = _log2(total_v, scale, drop, lift, inverse_alpha, GEOMETRIC, FAST) - reference
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
        peak = _log2(highest, scale, drop, lift, inverse_alpha, GEOMETRIC, FAST)
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
def _largest(row, half_stride, V, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        best = tl.maximum(_total(row + v, half_stride, v < V, float("-inf"), WHOLE), best)
    return tl.max(best, 0)


@triton.jit
def _known(highest, half, power, n, N, parts, PARTS: tl.constexpr, other):
    """What `sample_sums` kept of the parts of the classes."""
    part = tl.arange(0, PARTS)
    at = highest + ((6 * half + power) * N + n) * parts + part
    return tl.load(at, mask=part < parts, other=other)


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


@triton.jit
def _of_alpha(
    row,  # of the whole's first half, or of the half
    half_stride,
    highest,
    first,
    G,  # at this target, as below
    G_half,
    peaks,
    classes,
    entropies,
    n,
    N,
    V,
    power,
    alpha,
    lift,
    size,
    which,
    A,
    total,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    GEOMETRIC: tl.constexpr,
    FAST: tl.constexpr,
):
    """What an alpha needs of the whole or of a half."""
    scale = 1 / tl.where(which == 0, 2 * size, size).to(tl.float32)
    inverse_alpha = 1 / tl.where(alpha > 0, alpha, 1.0)
    drop = tl.exp2(-lift)
    lift -= tl.log2(scale)
    nothing = float("-inf")
    if which == 0:
        # Both halves' largest sums together are at most twice the largest of the whole, unless
        # logarithms are summed. That is 1/α too high in log2, which the last rung must stand.
        if GEOMETRIC:  # noqa: SIM114 (known when it is compiled)
            most = _largest(row, half_stride, V, BLOCK, True)
        elif tl.load(first + 7) * 128 * inverse_alpha > 100:
            most = _largest(row, half_stride, V, BLOCK, True)
        else:
            most = tl.max(_known(highest, 0, power, n, N, parts, PARTS, nothing), 0)
            most += tl.max(_known(highest, 1, power, n, N, parts, PARTS, nothing), 0)
        peak, where, entropy = _climb(
            row,
            half_stride,
            V,
            most,
            scale,
            drop,
            lift,
            inverse_alpha,
            first,
            G,
            total,
            True,
            GEOMETRIC,
            8,
            TILE,
            4 if FAST else 1,
            FAST,
        )
        tl.store(peaks, peak * LN2)
        tl.store(classes, where)
        tl.store(entropies, entropy)
    else:
        if PAIRS:
            most = _largest(row, half_stride, V, BLOCK, False)
        else:
            most = tl.max(_known(highest, which - 1, power, n, N, parts, PARTS, nothing), 0)
        peak, _, _ = _climb(
            row,
            half_stride,
            V,
            most,
            scale,
            drop,
            lift,
            inverse_alpha,
            first,
            G_half + ((which - 1) * A * _ROUGH).to(tl.int64) * total,
            total,
            False,
            GEOMETRIC,
            2,
            TILE,
            8 if FAST else 1,
            FAST,
        )
        tl.store(peaks + which * A * total, peak * LN2)


@triton.jit(do_not_specialize=["N", "first_target", "total", "size"])
def family_nodes(
    sums,  # [2, 6, N, width], or logits [N, 2, width]
    highest,  # [2, 6, N, parts] as `sample_sums` leaves it; not read with logits
    powers,
    alphas,
    lifts,  # [A] of the sums, log2
    first,  # [8] b of the first octave
    G,  # [A, rungs and 1 and 2, total]
    G_half,  # [2, A, every fourth rung and 1, total]
    peaks,
    classes,
    entropies,
    spread,
    lowest,  # [2, total]
    N,  # targets of this chunk
    V,
    width,
    A,
    size,
    first_target,  # the chunk's first target among all
    total,  # targets of all chunks
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
    lift = tl.load(lifts + a)
    place = first_target + n
    G += (a * _FINE).to(tl.int64) * total + place
    G_half += (a * _ROUGH).to(tl.int64) * total + place
    peaks += a * total + place
    classes += a * total + place
    entropies += a * total + place
    if PAIRS:
        half_stride = width.to(tl.int64)
        row = sums + n.to(tl.int64) * (2 * width) + half * half_stride
        _of_alpha(
            row,
            half_stride,
            highest,
            first,
            G,
            G_half,
            peaks,
            classes,
            entropies,
            n,
            N,
            V,
            power,
            alpha,
            lift,
            size,
            which,
            A,
            total,
            parts,
            PARTS,
            BLOCK,
            TILE,
            True,
            True,
            FAST,
        )
    else:
        half_stride = 6 * N.to(tl.int64) * width
        row = sums + (power * N + n).to(tl.int64) * width + half * half_stride
        if power == 0:
            _of_alpha(
                row,
                half_stride,
                highest,
                first,
                G,
                G_half,
                peaks,
                classes,
                entropies,
                n,
                N,
                V,
                power,
                alpha,
                lift,
                size,
                which,
                A,
                total,
                parts,
                PARTS,
                BLOCK,
                TILE,
                False,
                True,
                FAST,
            )
        else:
            _of_alpha(
                row,
                half_stride,
                highest,
                first,
                G,
                G_half,
                peaks,
                classes,
                entropies,
                n,
                N,
                V,
                power,
                alpha,
                lift,
                size,
                which,
                A,
                total,
                parts,
                PARTS,
                BLOCK,
                TILE,
                False,
                False,
                FAST,
            )
        if a == 0:
            if which == 0:
                tl.store(spread + place, _spread(sums, half_stride, n, N, V, width, BLOCK))
            else:
                least = _known(highest, half, 5, n, N, parts, PARTS, float("inf"))
                tl.store(lowest + half * total + place, tl.min(least, 0) / size)
