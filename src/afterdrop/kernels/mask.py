"""Training masks: a pure function of seed, step, site and element, drawn inside a CUDA graph."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _draw(mask, counter, count, seed, site, rate, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    step = tl.load(counter).to(tl.uint32)
    # Philox takes a key and a counter of four words: an element, a step, a site.
    zero = index * 0
    word, _, _, _ = tl.philox(
        seed,
        index.to(tl.uint32),
        (zero + step).to(tl.uint32),
        (zero + site).to(tl.uint32),
        zero.to(tl.uint32),
    )
    u = (word >> 8).to(tl.float32) * (1.0 / 16777216.0)
    kept = tl.where(u >= rate, 1 / (1 - rate), 0.0)
    tl.store(mask + index, kept.to(mask.dtype.element_ty), mask=index < count)


def draw_mask(mask: Tensor, counter: Tensor, seed: int, site: int, rate: float) -> None:
    """Fills a mask with 0 and 1/(1 − rate).

    Args:
        mask: Contiguous, any shape and type.
        counter: The step, an int64 scalar on the device.
        seed: Of the run.
        site: Number of the site.
        rate: Probability of dropping.
    """
    assert mask.is_contiguous()
    grid = (-(-mask.numel() // _BLOCK),)
    _draw[grid](mask, counter, mask.numel(), seed, site, rate, BLOCK=_BLOCK)
