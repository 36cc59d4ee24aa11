"""Sums over mask samples: the log-sum-exp of each row, then sums of powers of probabilities.

For each target and class, and for each half of the samples, these sums are kept:

    Σ log2 p       Σ p^¼  Σ p^½  Σ p^¾  Σ p          Σ p²

One exponential gives all powers. The sums are plain, of p · 2^48 and its powers: log p is at most
0, so nothing overflows, not even Σ p², and the sum of p underflows only if its mean is below
exp(−115). The mean of log p is lower still; the lowest over all classes is stored so that the
caller can check it. The factor is added in the exponent, which rounds log2 p^¼ by 5e-7 near 0 and
sums of ten of them by 2e-6: log-partitions at 1/T = 20 are within 1e-4.

Letters: M multipliers, N targets, Q pairs of multiplier and target whose sums are kept together (of
which M · N are added at a time), K samples (S of a chunk), V classes; powers in the order above.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels import log_sum_exp

LIFT: tl.constexpr = tl.constexpr(48)  # p · 2^48 does not underflow where p ≥ exp(−115)
LIFTS = tuple(power * LIFT.value // 4 for power in range(5))  # log2 of the factors of Σ p^0 to Σ p


@triton.jit(do_not_specialize=["S", "N", "k0"])
def row_lse(
    logits,
    targets,
    lse,
    chosen,
    entropies,
    V,
    by_sample,  # strides of the logits
    by_group,
    by_target,
    S,
    N,
    K,
    k0,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The log-sum-exp of a row, the log p of its target, and its entropy."""
    # In reverse order: what the product wrote last is still in the cache.
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    q = row // S
    k = row % S
    at = logits + k.to(tl.int64) * by_sample
    at += (q // N).to(tl.int64) * by_group + (q % N).to(tl.int64) * by_target
    # A thread holds whole groups of classes.
    v = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peak, total = log_sum_exp.begin(BLOCK // GROUP)
    weighted = total
    for _ in range(V // BLOCK):  # without masks, so that loads are wide
        x = tl.load(at + v).to(tl.float32)
        peak, total, weighted = log_sum_exp.weigh(x, peak, total, weighted)
        v += BLOCK
    inside = v < V
    x = tl.load(at + v, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(
        inside, x, log_sum_exp.NOTHING
    )  # too low for float16 to be the value of a masked load
    peak, total, weighted = log_sum_exp.weigh(x, peak, total, weighted)
    found, entropy = log_sum_exp.end_weighed(peak, total, weighted)
    tl.store(lse + row, found)
    own = tl.load(at + tl.load(targets + q % N)).to(tl.float32)
    place = q.to(tl.int64) * K + k0 + k
    tl.store(chosen + place, own - found)
    tl.store(entropies + place, entropy)


@triton.jit(do_not_specialize=["first", "Q", "N", "S", "size", "half", "halves", "quarter_of"])
def power_sums(
    logits,
    lse,
    sums,
    highest,
    V,
    readable,  # columns of the logits, at least V: a known multiple makes loads wide
    width,  # columns of the sums, likewise
    by_sample,
    by_group,
    by_target,
    first,  # position of these pairs among the Q pairs
    Q,
    N,
    S,
    size,  # samples per half in these logits
    half,  # the first half that they belong to
    halves,  # the number of halves that they belong to
    quarter_of,  # base-2 logarithm of the base of the logits, divided by 4
    FINE: tl.constexpr,  # whether to multiply by the factor, not to add it in the exponent
    ADD: tl.constexpr,  # whether to add to existing sums
    TOGETHER: tl.constexpr,  # samples loaded at once; divides `size`
    BLOCK: tl.constexpr,
):
    """Sums over the samples of a half for one part of the classes of a pair."""
    # Programs of one pair are neighbours, so that together they read whole rows, and the first
    # pairs while these are still in the cache.
    parts = tl.cdiv(V, BLOCK)
    block = tl.program_id(0) % parts
    part = tl.program_id(0) // parts % halves
    q = tl.program_id(0) // (parts * halves)
    v = block * BLOCK + tl.arange(0, BLOCK)
    inside = v < V
    at = logits + (q // N).to(tl.int64) * by_group + (q % N).to(tl.int64) * by_target
    at += (part * size).to(tl.int64) * by_sample + v
    s0 = tl.zeros((BLOCK,), tl.float32)
    s1 = tl.zeros((BLOCK,), tl.float32)
    s2 = tl.zeros((BLOCK,), tl.float32)
    s3 = tl.zeros((BLOCK,), tl.float32)
    s4 = tl.zeros((BLOCK,), tl.float32)
    s8 = tl.zeros((BLOCK,), tl.float32)
    at_lse = lse + q * S + part * size
    lift: tl.constexpr = 0 if FINE else LIFT // 4  # added to log2 p^¼
    for start in tl.range(0, size, TOGETHER, num_stages=3):  # prefetches
        group = tl.full(
            (BLOCK,), -TOGETHER * lift / 2, tl.float32
        )  # centred near 0, where float32 is fine
        for step in tl.static_range(TOGETHER):
            x = tl.load(at, mask=v < readable, other=0.0).to(tl.float32)
            at += by_sample
            lse_k = tl.load(at_lse + start + step)
            quarter = x * quarter_of - (lse_k * quarter_of - lift)  # log2 p^¼
            e1 = tl.exp2(quarter)
            if FINE:
                e1 *= 2 ** (LIFT // 4)
            e2 = e1 * e1
            p = e2 * e2
            group += quarter
            s1 += e1
            s2 += e2
            s3 += e1 * e2
            s4 += p
            s8 += p * p
        s0 += group - TOGETHER * lift / 2
    s0 *= 4
    place = sums + ((half + part) * 6 * Q + first + q).to(tl.int64) * width + v
    power = Q.to(tl.int64) * width
    if ADD:
        s0 += tl.load(place, mask=v < width, other=0.0)
        s1 += tl.load(place + power, mask=v < width, other=0.0)
        s2 += tl.load(place + 2 * power, mask=v < width, other=0.0)
        s3 += tl.load(place + 3 * power, mask=v < width, other=0.0)
        s4 += tl.load(place + 4 * power, mask=v < width, other=0.0)
        s8 += tl.load(place + 5 * power, mask=v < width, other=0.0)
    # The largest sum of this part: the kernel that reads the sums starts from the largest of all.
    largest = highest + ((half + part) * 6 * Q + first + q) * parts + block
    lowest = float("-inf")
    tl.store(largest, tl.max(tl.where(inside, s0, lowest), 0))
    tl.store(largest + Q * parts, tl.max(tl.where(inside, s1, lowest), 0))
    tl.store(largest + 2 * Q * parts, tl.max(tl.where(inside, s2, lowest), 0))
    tl.store(largest + 3 * Q * parts, tl.max(tl.where(inside, s3, lowest), 0))
    tl.store(largest + 4 * Q * parts, tl.max(tl.where(inside, s4, lowest), 0))
    least = tl.where(s0 > lowest, s0, lowest)  # −inf for NaN
    tl.store(largest + 5 * Q * parts, tl.min(tl.where(inside, least, float("inf")), 0))
    tl.store(place, s0, mask=v < width)
    tl.store(place + power, s1, mask=v < width)
    tl.store(place + 2 * power, s2, mask=v < width)
    tl.store(place + 3 * power, s3, mask=v < width)
    tl.store(place + 4 * power, s4, mask=v < width)
    tl.store(place + 5 * power, s8, mask=v < width)
