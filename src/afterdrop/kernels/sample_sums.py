"""Sums over mask samples: each row's log-sum-exp, then every power of its probabilities.

For each target the sums over the samples of a half are kept for every class:

    Σ log2 p       Σ p^¼  Σ p^½  Σ p^¾  Σ p          Σ p²

One exponential gives all powers. They are plain sums of p · 2^48 and what follows from it: log p is
at most 0, so nothing overflows, not even Σ p², and the sum of p only underflows where its mean is
below exp(−115). The mean of log p is lower still, and the lowest of all classes is kept for whoever
calls. The factor is added in the exponent, which rounds log2 p^¼ to 5e-7 where it is near 0 and
sums of ten of them to 2e-6: log-partitions at 1/T = 20 are within 1e-4.

Letters: Q targets, of which groups · N at a time, S samples of K, V classes; powers in the order
above.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels import log_sum_exp

LIFT: tl.constexpr = tl.constexpr(48)  # 2 to this keeps p from underflow
LIFTS = tuple(power * LIFT.value // 4 for power in range(5))  # the same of all sums but the last


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
    """A row's log-sum-exp, its target's log p and its entropy."""
    # From the end, where the product has just been: that is still in the cache.
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    q = row // S
    k = row % S
    at = logits + k.to(tl.int64) * by_sample
    at += (q // N).to(tl.int64) * by_group + (q % N).to(tl.int64) * by_target
    # A thread has whole groups of classes.
    v = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peak, total = log_sum_exp.begin(BLOCK // GROUP)
    weighted = total
    for _ in range(V // BLOCK):  # without masks, so that loads are as wide as they can be
        x = tl.load(at + v).to(tl.float32)
        peak, total, weighted = log_sum_exp.weigh(x, peak, total, weighted)
        v += BLOCK
    inside = v < V
    x = tl.load(at + v, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x, log_sum_exp.NOTHING)  # float16 has no such number to load
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
    readable,  # columns of the logits, V or more: a known multiple makes loads wide
    width,  # of the rows of sums, likewise
    by_sample,
    by_group,
    by_target,
    first,  # of these targets among those of the sums
    Q,
    N,
    S,
    size,  # samples of a half in these logits
    half,  # the first half that they belong to
    halves,  # how many they belong to
    quarter_of,  # the base's logarithm to base 2, divided by 4
    FINE: tl.constexpr,  # whether a lifted logarithm would be too rough
    ADD: tl.constexpr,  # to sums that are there
    TOGETHER: tl.constexpr,  # samples that are asked for together; divides `size`
    BLOCK: tl.constexpr,
):
    """The sums over samples of some classes of a target, for one half or each of both."""
    # Programs of a target lie side by side: together they read whole rows, and the first targets
    # while they are still in the cache.
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
    lift: tl.constexpr = 0 if FINE else LIFT // 4  # of logarithms
    for start in tl.range(0, size, TOGETHER, num_stages=3):  # the next ones are under way
        group = tl.full((BLOCK,), -TOGETHER * lift / 2, tl.float32)  # near 0, where sums are fine
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
    # The largest of these classes; who reads the sums begins with the largest of all.
    largest = highest + ((half + part) * 6 * Q + first + q) * parts + block
    lowest = float("-inf")
    tl.store(largest, tl.max(tl.where(inside, s0, lowest), 0))
    tl.store(largest + Q * parts, tl.max(tl.where(inside, s1, lowest), 0))
    tl.store(largest + 2 * Q * parts, tl.max(tl.where(inside, s2, lowest), 0))
    tl.store(largest + 3 * Q * parts, tl.max(tl.where(inside, s3, lowest), 0))
    tl.store(largest + 4 * Q * parts, tl.max(tl.where(inside, s4, lowest), 0))
    least = tl.where(s0 > lowest, s0, lowest)  # of no number too
    tl.store(largest + 5 * Q * parts, tl.min(tl.where(inside, least, float("inf")), 0))
    tl.store(place, s0, mask=v < width)
    tl.store(place + power, s1, mask=v < width)
    tl.store(place + 2 * power, s2, mask=v < width)
    tl.store(place + 3 * power, s3, mask=v < width)
    tl.store(place + 4 * power, s4, mask=v < width)
    tl.store(place + 5 * power, s8, mask=v < width)
