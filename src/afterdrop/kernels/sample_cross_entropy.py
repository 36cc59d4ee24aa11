"""Cross entropy of the mean prediction of several samples, and its gradient, in one kernel.

    loss = −log 1/S Σ_d p_d(y)      d loss / d logits_d = w_d (p_d − 1_y),  w = softmax_d log p_d(y)

Samples meet only in their target's probabilities, so nothing is averaged over the classes. A
program handles the rows of all samples of one target: first their log-sum-exps, then the weights,
then the gradients, which overwrite the logits.

Letters: N targets = time steps × B, S samples, V classes. Rows are [time, S, B].
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels import log_sum_exp
from afterdrop.kernels.cross_entropy import gradient
from afterdrop.kernels.log_constants import LOG2E

# Blocks of classes; a thread loads a group of 8, which are 16 bytes of float16.
_TARGETS = {"BLOCK": 2048, "GROUP": 8, "num_warps": 8}


@triton.jit
def row_log_sum_exp(at, bias, V, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """The log-sum-exp of one row of logits plus bias."""
    v = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peak, total = log_sum_exp.begin(BLOCK // GROUP)
    for _ in range(V // BLOCK):  # without masks, so that loads are wide
        x = tl.load(at + v).to(tl.float32) + tl.load(bias + v)
        peak, total = log_sum_exp.more(x, peak, total)
        v += BLOCK
    inside = v < V
    x = tl.load(at + v, mask=inside, other=float("-inf")).to(tl.float32)
    x += tl.load(bias + v, mask=inside, other=0.0)
    peak, total = log_sum_exp.more(x, peak, total)
    return log_sum_exp.end(peak, total)


@triton.jit
def overwrite_row(at, bias, V, target, lse, scale, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Overwrites one row of logits by their gradient."""
    v = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    dtype = at.dtype.element_ty
    for _ in range(V // BLOCK):
        x = tl.load(at + v).to(tl.float32) + tl.load(bias + v)
        tl.store(at + v, gradient(x, lse, v, target, scale).to(dtype))
        v += BLOCK
    inside = v < V
    x = tl.load(at + v, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + v, mask=inside, other=0.0)
    tl.store(at + v, gradient(x, lse, v, target, scale).to(dtype), mask=inside)


@triton.jit
def _targets(
    logits,  # [time · S · B, stride], overwritten by the gradient
    bias,  # [V] float32
    targets,  # [time · S · B] int64, equal for all samples
    loss,  # [N] float32
    effective,  # [N] float32
    V,
    B,
    stride,
    scale,
    log_samples,
    SAMPLES: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = n // B * SAMPLES * B + n % B
    target = tl.load(targets + first).to(tl.int32)
    lane = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float32)
    found = tl.full((LANES,), float("-inf"), tl.float32)  # log-probabilities of the target
    for d in range(SAMPLES):
        at = logits + (first + d * B) * stride
        own = tl.load(at + target).to(tl.float32) + tl.load(bias + target)
        lse = row_log_sum_exp(at, bias, V, BLOCK, GROUP)
        sums = tl.where(lane == d, lse, sums)
        found = tl.where(lane == d, own - lse, found)
    peak = tl.max(found, 0)
    terms = tl.exp2((found - peak) * LOG2E)
    total = tl.sum(terms, 0)
    weights = terms / total
    tl.store(loss + n, log_samples - peak - tl.log(total))
    tl.store(effective + n, 1 / tl.sum(weights * weights, 0))
    # The sums above synchronise the threads: all have read the targets' logits.
    for d in range(SAMPLES):
        lse = tl.sum(tl.where(lane == d, sums, 0.0), 0)
        weight = tl.sum(tl.where(lane == d, weights, 0.0), 0)
        at = logits + (first + d * B) * stride
        overwrite_row(at, bias, V, target, lse, scale * weight, BLOCK, GROUP)


def sample_cross_entropy(
    logits: Tensor,
    bias: Tensor,
    targets: Tensor,
    loss: Tensor,
    effective: Tensor,
    rows: int,
    scale: float,
) -> None:
    """Writes losses of the mean prediction, and the gradient times `scale` over the logits.

    Args:
        logits: [time · S · B, V₊]; padding columns from V on are neither read nor written.
        bias: [V] float32.
        targets: [time · S · B], the same for all samples.
        loss: [time · B] float32, written.
        effective: [time · B] float32, written: 1 / Σ_d w_d², the effective number of samples.
        rows: B.
        scale: Factor of the gradient, so that float16 can hold small ones.
    """
    assert logits.stride(1) == 1
    samples = len(logits) // len(loss)
    _targets[(len(loss),)](
        logits,
        bias,
        targets,
        loss,
        effective,
        len(bias),
        rows,
        logits.stride(0),
        scale,
        math.log(samples),
        SAMPLES=samples,
        LANES=triton.next_power_of_2(samples),
        **_TARGETS,
    )
