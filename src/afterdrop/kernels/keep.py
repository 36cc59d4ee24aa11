"""Masks of any site in one kernel, and plain dropout with them in another.

The fast form of `masks.rows.keep_mask` and `Keep.drop`, to the bit. Dropout reads its tensor and
writes the result; its mask never leaves the registers.

Letters: M multipliers, S samples, P examples, U units of an example (all its coordinates). A tensor
is seen as [A, M · S · P, B, C] with A · B · C = U: what lies around the rows, with the strides that
it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from functools import cached_property, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterdrop.kernels.uniform import Draws, draws, mix, uniform, why_not_drawn
from afterdrop.masks import rows as plain
from afterdrop.masks.rows import Keep, Layout, Rows
from afterdrop.masks.uniforms import hashed

_MOST_SAMPLES, _MOST_UNITS = 16, 128  # of a block


@triton.jit
def _uniforms(
    p, units, k, U, examples, site, hashes, table, key, columns, size, inverse, below, first
):
    """Uniforms [samples, units] of an example."""
    place = mix(mix(tl.load(examples + p)) + site)
    words = tl.load(hashes + units, mask=units < U, other=0)
    return uniform(place, words, tl.load(key), table, columns, size, inverse, below, first + k)


@triton.jit(do_not_specialize=["site", "first", "S", "P", "M"])
def _keep(
    mask,  # [M, S, P, U]
    rates,
    S,
    P,
    M,
    U,
    examples,
    site,
    hashes,
    table,
    key,
    columns,
    size,
    inverse,
    below,
    first,
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    blocks = tl.cdiv(U, BLOCK_U)
    p = tl.program_id(0) // blocks
    units = tl.program_id(0) % blocks * BLOCK_U + tl.arange(0, BLOCK_U)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (units[None, :] < U)
    u = _uniforms(
        p, units, k, U, examples, site, hashes, table, key, columns, size, inverse, below, first
    )
    for m in range(M):
        at = mask + ((m * S + k).to(tl.int64) * P + p)[:, None] * U + units[None, :]
        kept = tl.where(u >= tl.load(rates + m), 1.0, 0.0)
        tl.store(at, kept.to(mask.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["site", "first", "S", "P", "M"])
def _drop(
    x,
    out,
    rates,
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
    columns,
    size,
    inverse,
    below,
    first,
    SPLIT: tl.constexpr,  # whether the units of a row lie in more than one run
    BLOCK_K: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    blocks = tl.cdiv(U, BLOCK_U)
    p = tl.program_id(0) // blocks
    units = tl.program_id(0) % blocks * BLOCK_U + tl.arange(0, BLOCK_U)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (k[:, None] < S) & (units[None, :] < U)
    u = _uniforms(
        p, units, k, U, examples, site, hashes, table, key, columns, size, inverse, below, first
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
        dropped = value.to(factor.dtype) * tl.where(u >= tl.load(rates + m), factor, 0.0)
        tl.store(out_at[None, :] + row * out_row, dropped.to(out.dtype.element_ty), mask=inside)


@lru_cache(maxsize=64)
def _hashes(coords: tuple[int, ...], device: torch.device) -> Tensor:
    """The words of all units of an example [U], without that of the example."""
    words = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(coords):
        words = words.unsqueeze(-1) + hashed(dim, size, device)
    return words.flatten()


@lru_cache(maxsize=256)
def _numbers(
    rates: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rates of dropping [M], and the factors of what is kept, as a mask of a dtype has them."""
    own = torch.tensor(rates)
    factors = torch.ones(len(rates), dtype=dtype).div_(1.0 - (own if len(own) > 1 else rates[0]))
    wide = factors.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return own.to(device), wide.to(device)


_draws = lru_cache(maxsize=16)(draws)


@dataclasses.dataclass(frozen=True)
class _Draw:
    """What the kernels need to draw the masks of a site.

    Attributes:
        rows: The rows of the pass.
        examples: [P] numbers that key the masks.
        site: The key of site and call.
        coords: Sizes of an example's coordinates.
        at: Where the rows come between them.
        rates: Of dropping, for each multiplier.
        like: A tensor of the mask's dtype and device.
        found: Tables and keys.
    """

    rows: Rows
    examples: Tensor
    site: int
    coords: tuple[int, ...]
    at: int
    rates: tuple[float, ...]
    like: Tensor
    found: Draws

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """S, P, M and U."""
        S, P, M = len(self.rows.samples), len(self.examples), len(self.rates)
        return S, P, M, math.prod(self.coords)

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """Rates and factors."""
        return _numbers(self.rates, self.like.dtype, self.like.device)

    def launch(self, kernel: triton.JITFunction, *arguments: object, **options: bool) -> None:
        """Runs a kernel over blocks of units, examples and samples."""
        S, P, _, U = self.sizes
        block, first = divmod(self.rows.samples.start, self.found.size)
        _, _, *numbers = self.found.arguments
        block_k = min(_MOST_SAMPLES, triton.next_power_of_2(S))
        block_u = min(_MOST_UNITS, triton.next_power_of_2(U))
        kernel[(triton.cdiv(U, block_u) * P, triton.cdiv(S, block_k))](
            *arguments,
            *self.sizes,
            self.examples,
            self.site,
            _hashes(self.coords, self.like.device),
            self.found.tables[block],
            self.found.keys[block:],
            *numbers,
            first,
            **options,
            BLOCK_K=block_k,
            BLOCK_U=block_u,
        )


class Drawn(Keep):
    """A mask that is only made if something else than `drop` asks for it."""

    draw: _Draw

    def __init__(
        self, draw: _Draw, rate: Tensor | float, dim: int | None, sizes: tuple[int, ...]
    ) -> None:
        for name, value in {"draw": draw, "rate": rate, "dim": dim, "sizes": sizes}.items():
            object.__setattr__(self, name, value)

    @cached_property
    def mask(self) -> Tensor:
        """1 where a unit is kept, 0 where it is dropped."""
        S, P, M, U = self.draw.sizes
        mask = torch.empty(M, S, P, U, dtype=self.draw.like.dtype, device=self.draw.like.device)
        self.draw.launch(_keep, mask, self.draw.numbers[0])
        at = self.draw.at
        return mask.view(M, S, P, *self.draw.coords).movedim((0, 1, 2), (at, at + 1, at + 2))

    def drop(self, x: Tensor) -> Tensor:
        """See `Keep.drop`."""
        S, P, M, U = self.draw.sizes
        if x.numel() != S * P * M * U:  # what a mask value is shared by
            return super().drop(x)
        inner = self.draw.coords[self.draw.at :]
        outer = math.prod(self.draw.coords[: self.draw.at])
        four = _viewed(x, (outer, M * S * P), inner)
        if four is None:
            x = x.contiguous()
            four = x.view(outer, M * S * P, 1, math.prod(inner))
        out = torch.empty_like(x)
        result = out.view(four.shape)
        sizes = four.shape[2:]
        split = outer > 1 or sizes[0] > 1
        strides = *four.stride(), *result.stride()
        self.draw.launch(_drop, four, result, *self.draw.numbers, *sizes, *strides, SPLIT=split)
        return out


def _viewed(x: Tensor, outside: tuple[int, int], inner: tuple[int, ...]) -> Tensor | None:
    """A tensor as [A, rows, B, C] without a copy, in one run of units if it can be; else None."""
    for last in (math.prod(inner), *inner[-1:]):
        with contextlib.suppress(RuntimeError):
            return x.view(*outside, math.prod(inner) // last, last)
    return None


def keep_mask(rows: Rows, key: int, layout: Layout, like: Tensor, rate: float) -> Keep:
    """See `masks.rows.keep_mask`, which does what these kernels do not."""
    shape = list(like.shape)
    if layout.dim is None or shape[layout.dim] % len(rows) or not like.numel():
        return plain.keep_mask(rows, key, layout, like, rate)
    if why_not_drawn(rows.plan):
        return plain.keep_mask(rows, key, layout, like, rate)
    found = _draws(rows.plan, like.device)
    if rows.samples.stop > (rows.samples.start // found.size + 1) * found.size:
        return plain.keep_mask(rows, key, layout, like, rate)
    coords, at, flattened = plain.coordinates(shape, layout, len(rows))
    rates = tuple(m * rate for m in rows.multipliers)
    examples = rows.keys(layout).to(like.device)
    draw = _Draw(rows, examples, key, tuple(coords), at, rates, like, found)
    column = [len(rates)] + [1] * (len(coords) + 2 - at)
    three = (len(rates), len(rows.samples), len(rows.examples))
    sizes = (*flattened, *three) if at > layout.dim else (*three, *flattened)
    each = draw.numbers[0].view(column) if len(rates) > 1 else rates[0]
    return Drawn(draw, each, layout.dim, sizes)
