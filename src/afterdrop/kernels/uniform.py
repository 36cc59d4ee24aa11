"""The uniforms of `masks.uniforms` inside a kernel, to the bit: Latin hypercubes over the samples.

The word of a unit is a sum of hashes of its coordinates, so it comes in two parts: that of the
example and time step (one number a place) and that of the unit (a vector that all places share).

Letters: P places (an example at a time step), K samples in blocks of equal size, H units.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from afterdrop.masks.uniforms import Plan, block_key, blocks, hashed, permutations


@triton.jit
def mix(x):
    """splitmix64, as `masks.uniforms` has it."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(place, hashes, key, table, columns, size, inverse, below, k):
    """Uniforms [samples, units] of one place.

    Args:
        place: The word of the place.
        hashes: The units' hashes.
        key: The key of the block of samples.
        table: [columns, size] strata of the block.
        columns: Permutations in the table.
        size: Samples in the block.
        inverse: 1 / size.
        below: The largest offset within a stratum.
        k: Which samples of the block.
    """
    word = mix(place + hashes + key)
    column = ((word & 0xFFFFFFFF) * columns) >> 32
    offset = ((word >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    offset = tl.minimum(offset * inverse, below)
    strata = tl.load(table + column[None, :] * size + k[:, None], mask=k[:, None] < size, other=0.0)
    return strata + offset[None, :]


@dataclasses.dataclass(frozen=True)
class Draws:
    """What kernels need of a plan: its tables of strata and the keys of its blocks.

    Attributes:
        tables: [blocks, columns, size].
        keys: [blocks] int64.
        blocks: Number of blocks.
        size: Samples of each.
    """

    tables: Tensor
    keys: Tensor
    blocks: int
    size: int

    @property
    def arguments(self) -> tuple[Tensor | int | float, ...]:
        """Tables, keys, columns, size, 1/size and the largest offset."""
        inverse = 1.0 / self.size
        return self.tables, self.keys, self.tables.shape[1], self.size, inverse, inverse - 2.0**-23


def why_not_drawn(plan: Plan) -> str | None:
    """Why kernels cannot draw a plan's masks; None if they can.

    Example:
        >>> why_not_drawn(Plan(4, scheme="iid"))
        "masks are 'iid'"
    """
    if plan.scheme != "lhs":
        return f"masks are {plan.scheme!r}"
    if plan.blocks > 2 or len({len(span) for span in blocks(plan)}) > 1:
        return f"samples are in {len(blocks(plan))} blocks"
    return None


def draws(plan: Plan, device: torch.device) -> Draws:
    """The tables and keys of a plan, on a device."""
    spans = blocks(plan)
    size = len(spans[0])
    tables = [
        permutations(plan.seed, at, size, device).t().contiguous() for at in range(len(spans))
    ]
    keys = [block_key(plan, at) for at in range(len(spans))]
    return Draws(torch.stack(tables), torch.tensor(keys, device=device), len(spans), size)


_hashed = lru_cache(maxsize=64)(hashed)  # a dozen tiny kernels, always the same


def words(examples: Tensor, steps: int | None, units: int) -> tuple[Tensor, Tensor]:
    """The words of places and of units whose sum is that of `masks.uniforms`.

    Args:
        examples: [W] `unit_words` of the examples under the key of site and call.
        steps: Time steps, a coordinate of the mask; None if it has none.
        units: Units, the last coordinate.

    Returns:
        [steps, W] (or [1, W]) and [units], int64; not to be written to.
    """
    places = examples.unsqueeze(0)
    if steps is not None:
        places = places + _hashed(0, steps, examples.device).unsqueeze(1)
    return places, _hashed(0 if steps is None else 1, units, examples.device)
