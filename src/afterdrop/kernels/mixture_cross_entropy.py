"""Cross entropy of a mixture of softmaxes, and its gradients, in one kernel.

    loss = −log 1/S Σ_d Σ_k π_dk p_dk(y)          w_dk = π_dk p_dk(y) / Σ_ej π_ej p_ej(y)
    d loss / d logits_dk = w_dk (p_dk − 1_y)      d loss / d prior_dk = π_dk Σ_j w_dj − w_dk

Components and samples meet only in their target's probabilities, so the mixture over the classes is
never computed. A program handles the rows of all samples and components of one target, as
`sample_cross_entropy` does with samples alone: first their log-sum-exps, then the weights, then the
gradients, which overwrite the logits.

Letters: N targets = time steps × B, S samples, C components, V classes. Places are [time, S, B],
rows [time, S, B, C]; `prior` holds the logits of π.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.log_constants import LOG2E
from afterdrop.kernels.sample_cross_entropy import overwrite_row, row_log_sum_exp

# Blocks of classes; a thread loads a group of 8, which are 16 bytes of float16.
_TARGETS = {"BLOCK": 2048, "GROUP": 8, "num_warps": 8}


@triton.jit
def _log_softmax(x):
    """The log-softmax of [samples, components] over components."""
    below = x - tl.max(x, 1)[:, None]
    return below - tl.log(tl.sum(tl.exp2(below * LOG2E), 1))[:, None]


@triton.jit
def _at(x, here):
    """The only element of x [samples, components] where `here` is true."""
    return tl.sum(tl.sum(tl.where(here, x, 0.0), 1), 0)


@triton.jit
def _targets(
    logits,  # [time · S · B · C, stride], overwritten by the gradient
    bias,  # [V] float32
    prior,  # [time · S · B, prior_stride] float32
    d_prior,  # [time · S · B, d_prior_stride], written
    targets,  # [time · S · B] int64, equal for all samples
    loss,  # [N] float32
    effective,  # [N] float32, written with several samples
    V,
    B,
    stride,
    prior_stride,
    d_prior_stride,
    scale,
    prior_scale,
    log_samples,
    SAMPLES: tl.constexpr,
    COMPONENTS: tl.constexpr,
    SAMPLE_LANES: tl.constexpr,
    COMPONENT_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = n // B * SAMPLES * B + n % B
    target = tl.load(targets + first).to(tl.int32)
    d, k = tl.arange(0, SAMPLE_LANES)[:, None], tl.arange(0, COMPONENT_LANES)[None, :]
    inside, places = (d < SAMPLES) & (k < COMPONENTS), first + d * B
    given = tl.load(prior + places * prior_stride + k, mask=inside, other=0.0)
    log_prior = _log_softmax(tl.where(k < COMPONENTS, given, float("-inf")))
    sums = tl.zeros((SAMPLE_LANES, COMPONENT_LANES), tl.float32)
    # Joint log-probabilities of each sample's component and the target.
    found = tl.full((SAMPLE_LANES, COMPONENT_LANES), float("-inf"), tl.float32)
    for row in range(SAMPLES * COMPONENTS):
        here = (d == row // COMPONENTS) & (k == row % COMPONENTS)
        place = first + row // COMPONENTS * B
        at = logits + (place * COMPONENTS + row % COMPONENTS) * stride
        own = tl.load(at + target).to(tl.float32) + tl.load(bias + target)
        lse = row_log_sum_exp(at, bias, V, BLOCK, GROUP)
        sums = tl.where(here, lse, sums)
        found = tl.where(here, log_prior + own - lse, found)
    peak = tl.max(tl.max(found, 1), 0)
    terms = tl.exp2((found - peak) * LOG2E)
    total = tl.sum(tl.sum(terms, 1), 0)
    weights = terms / total
    of_samples = tl.sum(weights, 1)
    tl.store(loss + n, log_samples - peak - tl.log(total))
    if SAMPLES > 1:
        tl.store(effective + n, 1 / tl.sum(of_samples * of_samples, 0))
    d_given = (tl.exp2(log_prior * LOG2E) * of_samples[:, None] - weights) * prior_scale
    at_prior = d_prior + places * d_prior_stride + k
    tl.store(at_prior, d_given.to(d_prior.dtype.element_ty), mask=inside)
    # The sums above synchronise the threads: all have read the targets' logits.
    for row in range(SAMPLES * COMPONENTS):
        here = (d == row // COMPONENTS) & (k == row % COMPONENTS)
        place = first + row // COMPONENTS * B
        at = logits + (place * COMPONENTS + row % COMPONENTS) * stride
        weight = scale * _at(weights, here)
        overwrite_row(at, bias, V, target, _at(sums, here), weight, BLOCK, GROUP)


def mixture_cross_entropy(
    logits: Tensor,
    bias: Tensor,
    prior: Tensor,
    d_prior: Tensor,
    targets: Tensor,
    loss: Tensor,
    effective: Tensor | None,
    rows: int,
    scale: float,
    prior_scale: float,
) -> None:
    """Writes losses of the mixture, and the gradient times `scale` over the logits.

    Args:
        logits: [time · S · B · C, V₊]; padding columns from V on are neither read nor written.
        bias: [V] float32.
        prior: [time · S · B, C] float32.
        d_prior: [time · S · B, C], written: the gradient of the prior's logits.
        targets: [time · S · B], the same for all samples.
        loss: [time · B] float32, written.
        effective: [time · B] float32, written: 1 / Σ_d (Σ_k w_dk)², the effective number of
            samples; None with one sample.
        rows: B.
        scale: Factor of the gradient of the logits, so that float16 can hold small ones.
        prior_scale: Factor of the gradient of the prior's logits.
    """
    assert logits.stride(1) == prior.stride(1) == d_prior.stride(1) == 1
    samples, components = len(prior) // len(loss), prior.shape[1]
    assert samples == 1 or effective is not None
    _targets[(len(loss),)](
        logits,
        bias,
        prior,
        d_prior,
        targets,
        loss,
        loss if effective is None else effective,
        len(bias),
        rows,
        logits.stride(0),
        prior.stride(0),
        d_prior.stride(0),
        scale,
        prior_scale,
        math.log(samples),
        SAMPLES=samples,
        COMPONENTS=components,
        SAMPLE_LANES=triton.next_power_of_2(samples),
        COMPONENT_LANES=triton.next_power_of_2(components),
        **_TARGETS,
    )
