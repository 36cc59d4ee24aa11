"""Kernels that draw masks where they need them: the mask alone, dropout, and that of attention.

Letters: M multipliers, S samples, P examples, U units of an example (all its coordinates). A tensor
is seen as [A, M · S · P, B, C] with A · B · C = U: what lies around the rows, with the strides that
it has. The arguments from `examples` on are those of `_strata`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.uniform import first_kept, mix, strata


@triton.jit
def _strata(
    p, units, k, U, examples, site, hashes, table, key, bases, width, size, inverse, below, k0
):
    """The strata of an example's units in each sample, and the units' offsets."""
    place = mix(mix(tl.load(examples + p)) + site)
    words = tl.load(hashes + units, mask=units < U, other=0)
    return strata(place, words, tl.load(key), table, bases, width, size, inverse, below, k0 + k)


@triton.jit(do_not_specialize=["site", "S", "P", "M"])
def keep_kernel(
    mask,  # [M, S, P, U]
    cuts,
    S,
    P,
    M,
    U,
    examples,
    site,
    hashes,
    table,
    key,
    bases,
    width,
    size,
    inverse,
    below,
    k0,
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """1 where a unit is kept, 0 where it is dropped."""
    blocks = tl.cdiv(U, BLOCK_U)
    p = tl.program_id(0) // blocks
    units = tl.program_id(0) % blocks * BLOCK_U + tl.arange(0, BLOCK_U)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (units[None, :] < U)
    stratum, offset = _strata(
        p, units, k, U, examples, site, hashes, table, key, bases, width, size, inverse, below, k0
    )
    for m in range(M):
        at = mask + ((m * S + k).to(tl.int64) * P + p)[:, None] * U + units[None, :]
        kept = tl.where(stratum >= first_kept(offset, cuts, m, M)[None, :], 1.0, 0.0)
        tl.store(at, kept.to(mask.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site", "S", "P", "M"])
def dropout_kernel(
    x,
    out,
    cuts,
    factors,  # of what is kept, in the dtype of the products
    B,
    C,
    x_a,  # strides
    x_row,
    x_b,
    x_c,
    out_a,
    out_row,
    out_b,
    out_c,
    S,
    P,
    M,
    U,
    examples,
    site,
    hashes,
    table,
    key,
    bases,
    width,
    size,
    inverse,
    below,
    k0,
    SPLIT: tl.constexpr,  # whether the units of a row lie in more than one run
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """A tensor times the factor of each row where it is kept, and times 0 elsewhere."""
    blocks = tl.cdiv(U, BLOCK_U)
    p = tl.program_id(0) // blocks
    units = tl.program_id(0) % blocks * BLOCK_U + tl.arange(0, BLOCK_U)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (units[None, :] < U)
    stratum, offset = _strata(
        p, units, k, U, examples, site, hashes, table, key, bases, width, size, inverse, below, k0
    )
    if SPLIT:
        a = (units // C // B).to(tl.int64)
        b = (units // C % B).to(tl.int64)
        c = (units % C).to(tl.int64)
        x_at = x + a * x_a + b * x_b + c * x_c
        out_at = out + a * out_a + b * out_b + c * out_c
    else:
        x_at = x + units.to(tl.int64) * x_c
        out_at = out + units.to(tl.int64) * out_c
    for m in range(M):
        row = ((m * S + k).to(tl.int64) * P + p)[:, None]
        value = tl.load(x_at[None, :] + row * x_row, mask=inside, other=0.0)
        factor = tl.load(factors + m)
        # Times 0 rather than 0: what is infinite or NaN stays so, as in the plain form.
        kept = stratum >= first_kept(offset, cuts, m, M)[None, :]
        dropped = value.to(factor.dtype) * tl.where(kept, factor, 0.0)
        tl.store(out_at[None, :] + row * out_row, dropped.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site", "S", "P", "M"])
def attention_kernel(
    scores,  # [M · S · P, U]: the weights take their place
    cuts,
    factors,
    queries,
    C,  # keys
    S,
    P,
    M,
    U,
    examples,
    site,
    hashes,
    table,
    key,
    bases,
    width,
    size,
    inverse,
    below,
    k0,
    CAUSAL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """The softmax over the keys of a query, dropped, in each sample."""
    lines = U // C
    p = tl.program_id(0) // lines
    line = tl.program_id(0) % lines
    c = tl.arange(0, BLOCK_U)
    units = line * C + c
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (c[None, :] < C)
    stratum, offset = _strata(
        p, units, k, U, examples, site, hashes, table, key, bases, width, size, inverse, below, k0
    )
    seen = c < C
    if CAUSAL:
        seen = seen & (c <= line % queries)
    for m in range(M):
        at = scores + ((m * S + k).to(tl.int64) * P + p)[:, None] * U + units[None, :]
        factor = tl.load(factors + m)
        x = tl.load(at, mask=inside, other=0.0).to(factor.dtype)
        x = tl.where(seen[None, :], x, float("-inf"))
        e = tl.exp(x - tl.max(x, 1)[:, None])
        weights = e / tl.sum(e, 1)[:, None]
        kept = stratum >= first_kept(offset, cuts, m, M)[None, :]
        dropped = weights * tl.where(kept, factor, 0.0)
        tl.store(at, dropped.to(scores.dtype.element_ty), mask=inside)
