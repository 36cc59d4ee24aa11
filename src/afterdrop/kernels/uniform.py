"""The masks of `masks.uniforms` inside a kernel, with the same bits: Latin hypercubes.

The word of a unit is the sum of the hashes of its coordinates. It is computed in two parts: one of
the example and time step (a number per place) and one of the unit (a vector shared by all places).

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

_VECTOR = 32  # strides of a table are multiples of it, with padding for a vector past the end


@triton.jit
def mix(x):
    """splitmix64, as in `masks.uniforms`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def strata(place, hashes, key, table, bases, width, size, inverse, below, k):
    """The strata [samples, units] of one place, and the offset of each unit in its stratum [units].

    A uniform is (stratum + offset) / size; `first_kept` says which strata are above a rate.

    Args:
        place: The word of the place.
        hashes: The hashes of the units.
        key: The key of the block of samples.
        table: [bases, width] the permutations of the block, each of which is also used rotated.
        bases: Number of permutations in the table.
        width: Stride of the table, with padding for loads past the last sample.
        size: Samples in the block.
        inverse: 1 / size.
        below: The largest offset, divided by size.
        k: Numbers of the samples in the block.
    """
    word = mix(place + hashes + key)
    column = (((word & 0xFFFFFFFF) * (bases * size)) >> 32).to(tl.int32)
    offset = ((word >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    offset = tl.minimum(offset * inverse, below)
    base = column // size
    # Samples are contiguous, so that loads are wide; a mask would split them.
    stratum = tl.load(table + base[None, :] * width + k[:, None]).to(tl.int32)
    stratum += (column - base * size)[None, :]
    return tl.where(stratum >= size, stratum - size, stratum), offset


@triton.jit
def first_kept(offset, cuts, m, M):
    """The first stratum of each unit that is kept at the m-th rate (see `cuts`)."""
    divided = tl.load(cuts + 2 * M + m).to(tl.int32)
    above = tl.load(cuts + M + m) + offset >= tl.load(cuts + m)
    return divided + tl.where(above, 0, 1)


def cuts(rates: Tensor, size: int) -> Tensor:
    """Rates, and the lower ends and numbers of the strata that they divide: [3, M].

    Strata below the divided one are dropped and those above it kept; inside it the uniform decides,
    in the same arithmetic as on a CPU.

    Args:
        rates: [M], converted to float32.
        size: Number of strata.

    Example:
        >>> cuts(torch.tensor([0.0, 0.3, 1.0]), 4)
        tensor([[ 0.0000,  0.3000,  1.0000],
                [ 0.0000,  0.2500, -1.0000],
                [ 0.0000,  1.0000,  4.0000]])
    """
    rates = rates.float()
    lower = torch.arange(size).float().div_(size)
    highest = lower + torch.tensor(_below(size), dtype=torch.float32)
    divided = (highest < rates.unsqueeze(1)).sum(1)
    ends = torch.cat([lower, lower.new_tensor([-1.0])])[divided]
    return torch.stack([rates, ends, divided.float()])


def _below(size: int) -> float:
    """The largest offset, divided by size, that stays inside a stratum."""
    return 1.0 / size - 2.0**-23


@dataclasses.dataclass(frozen=True)
class Draws:
    """What kernels need of a plan: the permutations and the keys of its blocks.

    Attributes:
        tables: [blocks, bases, width].
        keys: [blocks] int64.
        blocks: Number of blocks.
        size: Samples per block.
    """

    tables: Tensor
    keys: Tensor
    blocks: int
    size: int

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """Permutations per table, their stride, size, 1/size and the largest offset."""
        _, bases, width = self.tables.shape
        return bases, width, self.size, 1.0 / self.size, _below(self.size)


def why_not_drawn(plan: Plan) -> str | None:
    """The reason why kernels cannot draw the masks of a plan, or None if they can.

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
    width = -(-size // _VECTOR) * _VECTOR + _VECTOR
    found = [permutations(plan.seed, at, size) for at in range(len(spans))]
    tables = torch.zeros(
        len(spans), len(found[0]), width, dtype=torch.uint8
    )  # blocks have at most 128 strata
    tables[..., :size] = torch.stack(found)
    keys = [block_key(plan, at) for at in range(len(spans))]
    return Draws(tables.to(device), torch.tensor(keys, device=device), len(spans), size)


_hashed = lru_cache(maxsize=64)(hashed)  # otherwise a dozen small launches per call


def words(examples: Tensor, steps: int | None, units: int) -> tuple[Tensor, Tensor]:
    """The words of places and of units; their sums are the words of `masks.uniforms`.

    Args:
        examples: [B] `unit_words` of the examples under the key of site and call.
        steps: Number of time steps, a coordinate of the mask; None if it has no time dimension.
        units: Number of units, the last coordinate.

    Returns:
        [steps, B] (or [1, B]) and [units], int64; do not write to them.
    """
    places = examples.unsqueeze(0)
    if steps is not None:
        places = places + _hashed(0, steps, examples.device).unsqueeze(1)
    return places, _hashed(0 if steps is None else 1, units, examples.device)
