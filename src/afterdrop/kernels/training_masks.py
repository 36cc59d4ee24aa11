"""Training masks: a pure function of seed, step, site and element, drawn inside a CUDA graph.

`apply_mask` multiplies rows by a mask while copying or gathering them, `scatter_masked` while
adding them to a table.

Letters: R rows (time steps × examples), V rows of a table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048  # mask elements per program
_WIDE = 1024  # columns per program


@triton.jit
def _draw(mask, counter, count, seed, site, rate, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK // 4)
    step = tl.load(counter).to(tl.uint32)
    # Philox takes a key and a counter of four words, here element, step, site and 0, and gives
    # four random words: one per quarter of the block.
    zero = lane * 0
    words = tl.philox(
        seed,
        (tl.program_id(0) * (BLOCK // 4) + lane).to(tl.uint32),
        (zero + step).to(tl.uint32),
        (zero + site).to(tl.uint32),
        zero.to(tl.uint32),
    )
    for quarter in tl.static_range(4):
        u = (words[quarter] >> 8).to(tl.float32) * (1.0 / 16777216.0)
        kept = tl.where(u >= rate, 1 / (1 - rate), 0.0)
        index = tl.program_id(0) * BLOCK + quarter * (BLOCK // 4) + lane
        tl.store(mask + index, kept.to(mask.dtype.element_ty), mask=index < count)


@triton.jit
def _draw_part(mask, counter, count, seed, site, rate, run, whole, first, BLOCK: tl.constexpr):
    """Draws elements of `_draw`'s mask: runs of `run` elements, `whole` apart, from `first` on."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    element = (index // run) * whole + first + index % run
    lane = element % (BLOCK // 4)
    zero = index * 0
    words = tl.philox(
        seed,
        ((element // BLOCK) * (BLOCK // 4) + lane).to(tl.uint32),
        (zero + tl.load(counter).to(tl.uint32)).to(tl.uint32),
        (zero + site).to(tl.uint32),
        zero.to(tl.uint32),
    )
    quarter = element % BLOCK // (BLOCK // 4)
    word = tl.where(quarter == 0, words[0], words[1])
    word = tl.where(quarter == 2, words[2], word)
    word = tl.where(quarter == 3, words[3], word)
    u = (word >> 8).to(tl.float32) * (1.0 / 16777216.0)
    kept = tl.where(u >= rate, 1 / (1 - rate), 0.0)
    tl.store(mask + index, kept.to(mask.dtype.element_ty), mask=index < count)


def draw_mask(
    mask: Tensor,
    counter: Tensor,
    seed: int,
    site: int,
    rate: float,
    part: tuple[int, int, int] | None = None,
) -> None:
    """Fills a mask with 0 and 1/(1 − rate).

    Args:
        mask: Contiguous, of any shape and dtype, written.
        counter: The step, an int64 scalar on the device.
        seed: The seed of the run.
        site: The number of the site.
        rate: Probability of dropping.
        part: If the mask is part of a larger one: the length of each run of elements that are
            consecutive in both, the distance of their starts in the larger mask, and the first
            start. Four times as much work per element.
    """
    assert mask.is_contiguous()
    grid = (-(-mask.numel() // _BLOCK),)
    options = mask, counter, mask.numel(), seed, site, rate
    if part is None:
        _draw[grid](*options, BLOCK=_BLOCK)
    else:
        _draw_part[grid](*options, *part, BLOCK=_BLOCK)


@triton.jit
def _apply(
    source,
    mask,
    target,
    index,
    factors,
    width,
    rows,
    source_stride,
    mask_stride,
    target_stride,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    MASK: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    origin = row.to(tl.int64)
    place = origin
    if GATHER:
        origin = tl.load(index + row)
    if SCATTER:
        place = tl.load(index + row)
    x = tl.load(source + origin * source_stride + column, mask=inside, other=0.0).to(tl.float32)
    if MASK:
        x *= tl.load(mask + (row % rows) * mask_stride + column, mask=inside, other=0.0)
    if FACTORS:
        x *= tl.load(factors + tl.load(index + row)).to(tl.float32)
    at = target + place * target_stride + column
    if SCATTER:
        tl.atomic_add(at, x, mask=inside)
    else:
        tl.store(at, x.to(target.dtype.element_ty), mask=inside)


def apply_mask(
    source: Tensor,
    mask: Tensor | None,
    target: Tensor,
    width: int,
    index: Tensor | None = None,
    factors: Tensor | None = None,
) -> None:
    """Multiplies rows by a mask and rounds them to the dtype of the target.

    Args:
        source: [R, ≥ width], or with `index` a table.
        mask: [rows, ≥ width], repeated R / rows times; None for ones.
        target: [R, ≥ width], whose first `width` columns are written.
        width: Number of columns.
        index: [R], the row of the table for each row.
        factors: [V], with `index`: a factor for each row of the table; None for ones.
    """
    _multiply(len(target), source, mask, target, width, index, factors, scatter=False)


def scatter_masked(
    source: Tensor,
    mask: Tensor | None,
    target: Tensor,
    width: int,
    index: Tensor,
    factors: Tensor | None = None,
) -> None:
    """Adds rows times a mask to rows of a table, by atomic adds in no fixed order.

    Args:
        source: [R, ≥ width] float32.
        mask: As in `apply_mask`.
        target: The table [V, ≥ width] float32.
        width: Number of columns.
        index: [R], the row of the table for each row.
        factors: As in `apply_mask`.
    """
    _multiply(len(source), source, mask, target, width, index, factors, scatter=True)


def _multiply(
    count: int,
    source: Tensor,
    mask: Tensor | None,
    target: Tensor,
    width: int,
    index: Tensor | None,
    factors: Tensor | None,
    *,
    scatter: bool,
) -> None:
    """Runs the kernel over `count` rows; `index` refers to the target with `scatter`."""
    assert source.stride(-1) == target.stride(-1) == 1 and target.dim() == source.dim() == 2
    assert factors is None or index is not None
    given = source if mask is None else mask
    _apply[(count, -(-width // _WIDE))](
        source,
        given,
        target,
        target if index is None else index,
        source if factors is None else factors,
        width,
        len(given),
        source.stride(0),
        given.stride(0),
        target.stride(0),
        GATHER=index is not None and not scatter,
        SCATTER=scatter,
        MASK=mask is not None,
        FACTORS=factors is not None,
        BLOCK=_WIDE,
    )
