"""Results of every alpha from sums over samples, per target, for all samples and for each half.

The input is the sums of `sample_sums`, or with `PAIRS` the logits, to base 2, of the mean features
of both halves, whose mean is log M.

Letters: N targets, V classes, A alphas, b = 1/T.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.family.partition_ladder import HALVES_EVERY, OCTAVES, PER_OCTAVE
from afterdrop.kernels.family_partitions import row_partitions
from afterdrop.kernels.log_constants import LN2
from afterdrop.kernels.sample_sums import LIFT

_FINE: tl.constexpr = tl.constexpr(OCTAVES * PER_OCTAVE + 2)  # values of G for all samples
_ROUGH: tl.constexpr = tl.constexpr(OCTAVES * PER_OCTAVE // HALVES_EVERY + 1)  # and for a half


@triton.jit(do_not_specialize=["N"])
def pair_tops(logits, tops, N, V, stride, half_stride, parts, BLOCK: tl.constexpr):
    """The largest logit of each part of the classes, of both halves summed and of each: tops."""
    n, part = tl.program_id(0), tl.program_id(1)
    v = part * BLOCK + tl.arange(0, BLOCK)
    at = logits + n.to(tl.int64) * stride + v
    one = tl.load(at, mask=v < V, other=float("-inf"))
    two = tl.load(at + half_stride, mask=v < V, other=float("-inf"))
    place = tops + n * parts + part
    tl.store(place, tl.max(one + two, 0))
    tl.store(place + N * parts, tl.max(one, 0))
    tl.store(place + 2 * N * parts, tl.max(two, 0))


@triton.jit
def _known(tops, parts, PARTS: tl.constexpr, other):
    """The values stored for the parts of the classes."""
    part = tl.arange(0, PARTS)
    return tl.load(tops + part, mask=part < parts, other=other)


@triton.jit
def _largest_of(row, half_stride, V, part, PART: tl.constexpr):
    """The largest sum of both halves among a part of the classes."""
    v = part * PART + tl.arange(0, PART)
    total = tl.load(row + v, mask=v < V, other=float("-inf"))
    total += tl.load(row + half_stride + v, mask=v < V, other=float("-inf"))
    return tl.max(total, 0)


@triton.jit
def _largest(row, half_stride, V, both, parts, PART: tl.constexpr):
    """The largest sum of both halves among all classes; `both` bounds it for each part."""
    best = _largest_of(row, half_stride, V, tl.argmax(both, 0), PART)
    if tl.sum((both > best).to(tl.int32), 0) > 1:  # rare: another part may hold the largest
        for part in range(parts):
            best = tl.maximum(best, _largest_of(row, half_stride, V, part, PART))
    return best


@triton.jit
def _enough(least, lost, scale, alpha, GEOMETRIC: tl.constexpr):
    """The sum of a class whose log2 M is `lost` below that of the sum `least`."""
    if GEOMETRIC:
        return least - lost / scale
    return least * tl.exp2(-lost * alpha)


@triton.jit
def _spread(sums, half_stride, n, N, V, stride, BLOCK: tl.constexpr):
    """Σ_c Σ_k p² / Σ_k p − 1."""
    p_row = sums + (4 * N + n).to(tl.int64) * stride
    q_row = p_row + N.to(tl.int64) * stride
    ratio = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        inside = v < V
        p = tl.load(p_row + v, mask=inside, other=0.0)
        p += tl.load(p_row + half_stride + v, mask=inside, other=0.0)
        p *= 1.0 / 2**LIFT
        q = tl.load(q_row + v, mask=inside, other=0.0)
        q += tl.load(q_row + half_stride + v, mask=inside, other=0.0)
        q *= 1.0 / 4**LIFT
        ratio += tl.where(p > 0, q / tl.where(p > 0, p, 1.0), 0.0)
    return tl.sum(ratio, 0) - 1


@triton.jit(do_not_specialize=["N", "first_target", "total", "size"])
def family_nodes(
    sums,  # [2, 6, N, V₊], or logits [N, 2, V₊]
    highest,  # [2, 6, N, parts] from `sample_sums`, or [3, N, parts] from `pair_tops`
    powers,  # [A] numbers of the sums
    alphas,  # [A]
    lifts,  # [A] log2 of the factors of the sums
    first,  # [8] b of the first octave
    G,  # [A, powers of the ladder, 1 and 2; total]
    G_half,  # [2, A, every fourth power of the ladder, and 1; total]
    peaks,  # [3, A, total]
    classes,  # [A, total]
    entropies,  # [A, total]
    spread,  # [total]
    lowest,  # [2, total]
    N,  # targets of this chunk
    V,
    stride,  # between targets
    half_stride,
    A,
    size,
    first_target,  # the chunk's first target among all
    total,  # targets of all chunks
    parts,
    PARTS: tl.constexpr,
    PART: tl.constexpr,  # classes per part
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PAIRS: tl.constexpr,
    FAST: tl.constexpr,  # whether inline assembly can be used: not in the interpreter
):
    """Results of one alpha and target, for all samples (at all powers) or a half (every fourth)."""
    n = tl.program_id(0)
    a = tl.program_id(1)
    which = tl.program_id(2)  # 0 all samples, 1 and 2 the halves
    half = tl.maximum(which - 1, 0)
    power = tl.load(powers + a)
    alpha = tl.load(alphas + a)
    lift = tl.load(lifts + a)
    scale = 1 / tl.where(which == 0, 2 * size, size).to(tl.float32)
    inverse_alpha = 1 / tl.where(alpha > 0, alpha, 1.0)
    mean = scale, tl.exp2(-lift), lift - tl.log2(scale), inverse_alpha
    place = first_target + n
    nothing = float("-inf")
    half_stride = tl.cast(half_stride, tl.int64)
    if PAIRS:
        row = sums + n.to(tl.int64) * stride + half * half_stride
        tops_stride = 0
        tops = highest + (which * N + n) * parts
    else:
        row = sums + (power * N + n).to(tl.int64) * stride + half * half_stride
        tops_stride = 6 * N * parts
        tops = highest + (power * N + n) * parts + half * tops_stride
    # Classes that are this far below the peak together add at most 2^-17 to the sums of the two
    # highest octaves, which is less than the ladder's own interpolation error.
    lost = (17 + tl.log2(V.to(tl.float32))) / (64 * tl.load(first))
    known = _known(tops, parts, PARTS, nothing)
    most = tl.max(known, 0)
    given = row, half_stride, V, tops, tops_stride, mean, first
    # Both forms are compiled and one is run; `PAIRS` has only the geometric one.
    for geometric in tl.static_range(PAIRS, 2):
        if (power == 0).to(tl.int32) == geometric:
            if which == 0:
                least = most
                if not PAIRS:
                    # The largest sums of both halves add up to at most twice the largest sum of
                    # all samples, unless logarithms are summed. As a reference that is up to 1/α
                    # too high in log2, which must not underflow at the highest power.
                    others = _known(tops + tops_stride, parts, PARTS, nothing)
                    other = tl.max(others, 0)
                    least = tl.maximum(most, other)
                    most += other
                    if geometric or tl.load(first + 7) * 128 * inverse_alpha > 100:
                        most = _largest(row, half_stride, V, known + others, parts, PART)
                        least = most
                peak, where, entropy = row_partitions(
                    *given,
                    most,
                    _enough(least, lost, scale, alpha, geometric),
                    G + (a * _FINE).to(tl.int64) * total + place,
                    total,
                    True,
                    not PAIRS,
                    geometric,
                    8,
                    PART,
                    TILE,
                    FAST,
                )
                tl.store(peaks + a * total + place, peak * LN2)
                tl.store(classes + a * total + place, where)
                tl.store(entropies + a * total + place, entropy)
            else:
                peak, _, _ = row_partitions(
                    *given,
                    most,
                    _enough(most, lost, scale, alpha, geometric),
                    G_half + ((half * A + a) * _ROUGH).to(tl.int64) * total + place,
                    total,
                    False,
                    False,
                    geometric,
                    2,
                    PART,
                    TILE,
                    FAST,
                )
                tl.store(peaks + (which * A + a) * total + place, peak * LN2)
    if not PAIRS:  # noqa: SIM102 (a compile-time constant, unlike a)
        if a == 0:
            if which == 0:
                tl.store(spread + place, _spread(sums, half_stride, n, N, V, stride, BLOCK))
            else:
                held = highest + ((6 * half + 5) * N + n) * parts
                smallest = tl.min(_known(held, parts, PARTS, float("inf")), 0)
                tl.store(lowest + half * total + place, smallest / size * LN2)
