"""Masks of any site, and dropout with them, in one kernel each.

The fast forms of `masks.rows.draw_row_mask` and `RowMask.drop`, which give the same bits, and
of `RowMask.attention`. Dropout reads its tensor and writes the result; its mask stays in registers.

Letters as in `mask_kernels`: M multipliers, S samples, B examples, U units of an example.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from functools import cached_property, lru_cache

import torch
import triton
from torch import Tensor

from afterdrop.kernels import mask_kernels
from afterdrop.kernels.uniform import Draws, cuts, draws, why_not_drawn
from afterdrop.masks import rows as plain
from afterdrop.masks.rows import Layout, RowMask, Rows, coordinates
from afterdrop.masks.uniforms import hashed

_MOST_SAMPLES, _MOST_UNITS = 16, 128  # samples and units per program
LONGEST_LINE = 4096  # keys per query: as many numbers as fit the registers of a program


@lru_cache(maxsize=64)
def _hashes(coords: tuple[int, ...], device: torch.device) -> Tensor:
    """The words of all units of an example [U], without the word of the example."""
    words = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(coords):
        words = words.unsqueeze(-1) + hashed(dim, size, device)
    return words.flatten()


@lru_cache(maxsize=256)
def _numbers(
    rates: tuple[float, ...], size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cuts of the rates [3, M], and factors of kept units, rounded as a mask of `dtype` is."""
    own = torch.tensor(rates)
    factors = torch.ones(len(rates), dtype=dtype).div_(1.0 - (own if len(own) > 1 else rates[0]))
    wide = factors.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return cuts(own, size).to(device), wide.to(device)


_draws = lru_cache(maxsize=16)(draws)


@dataclasses.dataclass(frozen=True)
class _MaskDraw:
    """What the kernels need to draw the masks of a site.

    Attributes:
        rows: The rows of the pass.
        examples: [B] numbers that key the masks.
        site: The key of site and call.
        coords: Sizes of an example's coordinates.
        at: The position of the rows among the coordinates.
        rates: Dropout rate of each multiplier.
        like: A tensor of the mask's dtype and device.
        found: Tables and keys of the plan.
        longest_line: The largest number of keys per query that the kernel handles.
    """

    rows: Rows
    examples: Tensor
    site: int
    coords: tuple[int, ...]
    at: int
    rates: tuple[float, ...]
    like: Tensor
    found: Draws
    longest_line: int = LONGEST_LINE

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """S, B, M and U."""
        S, B, M = len(self.rows.samples), len(self.examples), len(self.rates)
        return S, B, M, math.prod(self.coords)

    @property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """Cuts, whose first row is the rates, and factors."""
        return _numbers(self.rates, self.found.size, self.like.dtype, self.like.device)

    def launch(
        self, kernel: triton.JITFunction, *arguments: object, line: int = 0, **options: bool
    ) -> None:
        """Runs a kernel over examples, samples and blocks of units, or lines of `line` units."""
        S, B, _, U = self.sizes
        block, first = divmod(self.rows.samples.start, self.found.size)
        block_u = triton.next_power_of_2(line or min(_MOST_UNITS, U))
        block_k = min(_MOST_SAMPLES, triton.next_power_of_2(S), max(1, LONGEST_LINE // block_u))
        pieces = U // line if line else triton.cdiv(U, block_u)
        kernel[(pieces * B, triton.cdiv(S, block_k))](
            *arguments,
            *self.sizes,
            self.examples,
            self.site,
            _hashes(self.coords, self.like.device),
            self.found.tables[block],
            self.found.keys[block:],
            *self.found.numbers,
            first,
            **options,
            BLOCK_K=block_k,
            BLOCK_U=block_u,
            num_warps=8 if block_k * block_u > _MOST_SAMPLES * _MOST_UNITS else 4,
            maxnreg=128,  # with more, unaligned lines leave room for one program per multiprocessor
        )


class FusedRowMask(RowMask):
    """A mask that is drawn inside `drop` and `attention`, and stored only if `mask` is read."""

    draw: _MaskDraw

    def __init__(
        self, draw: _MaskDraw, rate: Tensor | float, dim: int | None, sizes: tuple[int, ...]
    ) -> None:
        for name, value in {"draw": draw, "rate": rate, "dim": dim, "sizes": sizes}.items():
            object.__setattr__(self, name, value)

    @cached_property
    def mask(self) -> Tensor:
        """1 where a unit is kept, 0 where it is dropped."""
        S, B, M, U = self.draw.sizes
        mask = torch.empty(M, S, B, U, dtype=self.draw.like.dtype, device=self.draw.like.device)
        self.draw.launch(mask_kernels.keep_kernel, mask, self.draw.numbers[0])
        at = self.draw.at
        return mask.view(M, S, B, *self.draw.coords).movedim((0, 1, 2), (at, at + 1, at + 2))

    def drop(self, x: Tensor) -> Tensor:
        """Dropout of a tensor, as `RowMask.drop`."""
        S, B, M, U = self.draw.sizes
        if x.numel() != S * B * M * U:  # a mask value is shared by several elements
            return super().drop(x)
        inner = self.draw.coords[self.draw.at :]
        outer = math.prod(self.draw.coords[: self.draw.at])
        four = _viewed(x, (outer, M * S * B), inner)
        if four is None:
            x = x.contiguous()
            four = x.view(outer, M * S * B, 1, math.prod(inner))
        out = torch.empty_like(x)
        result = out.view(four.shape)
        sizes = four.shape[2:]
        split = outer > 1 or sizes[0] > 1
        strides = *four.stride(), *result.stride()
        self.draw.launch(
            mask_kernels.dropout_kernel,
            four,
            result,
            *self.draw.numbers,
            *sizes,
            *strides,
            SPLIT=split,
        )
        return out

    def attention(self, scores: Tensor, causal: bool) -> Tensor:
        """Dropout of attention weights, as `RowMask.attention`."""
        *_, queries, keys = scores.shape
        rows_first = self.draw.at == 0 and scores.dim() > 2 and scores.is_contiguous()
        if not rows_first or keys > self.draw.longest_line:
            return super().attention(scores, causal)
        numbers = self.draw.numbers
        self.draw.launch(
            mask_kernels.attention_kernel, scores, *numbers, queries, keys, line=keys, CAUSAL=causal
        )
        return scores


def _viewed(x: Tensor, outside: tuple[int, int], inner: tuple[int, ...]) -> Tensor | None:
    """A view [outer, rows, middle, inner], with middle = 1 if possible; None if it needs a copy."""
    for last in (math.prod(inner), *inner[-1:]):
        with contextlib.suppress(RuntimeError):
            return x.view(*outside, math.prod(inner) // last, last)
    return None


def fused_draw_mask(
    rows: Rows,
    key: int,
    layout: Layout,
    like: Tensor,
    rates: tuple[float, ...],
    *,
    longest_line: int = LONGEST_LINE,
) -> RowMask:
    """The mask of `masks.rows.draw_row_mask`, which is called where the kernels do not apply.

    Args:
        rows: As there.
        key: As there.
        layout: As there.
        like: As there.
        rates: As there.
        longest_line: Attention with more keys per query is left to the plain form.
    """
    shape = list(like.shape)
    if layout.dim is None or shape[layout.dim] % len(rows) or not like.numel():
        return plain.draw_row_mask(rows, key, layout, like, rates)
    if why_not_drawn(rows.plan):
        return plain.draw_row_mask(rows, key, layout, like, rates)
    found = _draws(rows.plan, like.device)
    if rows.samples.stop > (rows.samples.start // found.size + 1) * found.size:
        return plain.draw_row_mask(rows, key, layout, like, rates)
    coords, at, flattened = coordinates(shape, layout, len(rows))
    examples = rows.keys(layout).to(like.device)
    draw = _MaskDraw(rows, examples, key, tuple(coords), at, rates, like, found, longest_line)
    column = [len(rates)] + [1] * (len(coords) + 2 - at)
    three = (len(rates), len(rows.samples), len(rows.examples))
    sizes = (*flattened, *three) if at > layout.dim else (*three, *flattened)
    each = draw.numbers[0][0].view(column) if len(rates) > 1 else rates[0]
    return FusedRowMask(draw, each, layout.dim, sizes)
