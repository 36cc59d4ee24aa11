"""Kernels that draw masks in registers: the mask alone, dropout, and dropout of attention weights.

Letters: M multipliers, S samples, B examples, U units of an example (all its coordinates). A tensor
is viewed as [outer, M · S · B, middle, inner] with outer · middle · inner = U: the dimensions
around its rows, with its own strides. The arguments from `examples` on are those of `_strata`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from afterdrop.kernels.uniform import first_kept, mix, strata


@triton.jit
def _strata(
    i, units, k, U, examples, site, hashes, table, key, bases, width, size, inverse, below, k0
):
    """The strata of an example's units in each sample, and the units' offsets."""
    place = mix(mix(tl.load(examples + i)) + site)
    words = tl.load(hashes + units, mask=units < U, other=0)
    return strata(place, words, tl.load(key), table, bases, width, size, inverse, below, k0 + k)


@triton.jit(do_not_specialize=["site", "S", "B", "M"])
def keep_kernel(
    mask,  # [M, S, B, U]
    cuts,
    S,
    B,
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
    i = tl.program_id(0) // blocks
    units = tl.program_id(0) % blocks * BLOCK_U + tl.arange(0, BLOCK_U)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (units[None, :] < U)
    stratum, offset = _strata(
        i, units, k, U, examples, site, hashes, table, key, bases, width, size, inverse, below, k0
    )
    for m in range(M):
        at = mask + ((m * S + k).to(tl.int64) * B + i)[:, None] * U + units[None, :]
        kept = tl.where(stratum >= first_kept(offset, cuts, m, M)[None, :], 1.0, 0.0)
        tl.store(at, kept.to(mask.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site", "S", "B", "M"])
def dropout_kernel(
    x,
    out,
    cuts,
    factors,  # [M] of kept units, in the dtype of the products
    middle,
    inner,
    x_outer,  # strides
    x_row,
    x_middle,
    x_inner,
    out_outer,
    out_row,
    out_middle,
    out_inner,
    S,
    B,
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
    SPLIT: tl.constexpr,  # whether the units of a row are not equally spaced in memory
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """A tensor times the factor of its row where a unit is kept, and times 0 elsewhere."""
    blocks = tl.cdiv(U, BLOCK_U)
    i = tl.program_id(0) // blocks
    units = tl.program_id(0) % blocks * BLOCK_U + tl.arange(0, BLOCK_U)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (units[None, :] < U)
    stratum, offset = _strata(
        i, units, k, U, examples, site, hashes, table, key, bases, width, size, inverse, below, k0
    )
    if SPLIT:
        a = (units // inner // middle).to(tl.int64)
        b = (units // inner % middle).to(tl.int64)
        c = (units % inner).to(tl.int64)
        x_at = x + a * x_outer + b * x_middle + c * x_inner
        out_at = out + a * out_outer + b * out_middle + c * out_inner
    else:
        x_at = x + units.to(tl.int64) * x_inner
        out_at = out + units.to(tl.int64) * out_inner
    for m in range(M):
        row = ((m * S + k).to(tl.int64) * B + i)[:, None]
        value = tl.load(x_at[None, :] + row * x_row, mask=inside, other=0.0)
        factor = tl.load(factors + m)
        # Multiplied by 0 instead of set to 0: infinities and NaN give NaN, as in the plain form.
        kept = stratum >= first_kept(offset, cuts, m, M)[None, :]
        dropped = value.to(factor.dtype) * tl.where(kept, factor, 0.0)
        tl.store(out_at[None, :] + row * out_row, dropped.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site", "S", "B", "M"])
def attention_kernel(
    scores,  # [M · S · B, U], overwritten by the weights
    cuts,
    factors,
    queries,
    keys,
    S,
    B,
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
    """The softmax over the keys of each query, then dropout, in each sample."""
    lines = U // keys
    i = tl.program_id(0) // lines
    line = tl.program_id(0) % lines
    c = tl.arange(0, BLOCK_U)
    units = line * keys + c
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (c[None, :] < keys)
    stratum, offset = _strata(
        i, units, k, U, examples, site, hashes, table, key, bases, width, size, inverse, below, k0
    )
    seen = c < keys
    if CAUSAL:
        seen = seen & (c <= line % queries)
    for m in range(M):
        at = scores + ((m * S + k).to(tl.int64) * B + i)[:, None] * U + units[None, :]
        factor = tl.load(factors + m)
        x = tl.load(at, mask=inside, other=0.0).to(factor.dtype)
        x = tl.where(seen[None, :], x, float("-inf"))
        e = tl.exp(x - tl.max(x, 1)[:, None])
        weights = e / tl.sum(e, 1)[:, None]
        kept = stratum >= first_kept(offset, cuts, m, M)[None, :]
        dropped = weights * tl.where(kept, factor, 0.0)
        tl.store(at, dropped.to(scores.dtype.element_ty), mask=inside)
