"""The masks of `masks.uniforms` inside a kernel, to the bit: Latin hypercubes over the samples.

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

_VECTOR = 32  # samples that a table has room for beyond the last, and whose multiple is a stride


@triton.jit
def mix(x):
    """splitmix64, as `masks.uniforms` has it."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def strata(place, hashes, key, table, bases, width, size, inverse, below, k):
    """The strata [samples, units] of one place, and where in its stratum each unit lies [units].

    A uniform is (stratum + offset) / size; `first_kept` says which strata are above a rate.

    Args:
        place: The word of the place.
        hashes: The units' hashes.
        key: The key of the block of samples.
        table: [bases, width] the block's permutations; every rotation of one is another.
        bases: Permutations in the table.
        width: Their stride, for samples that there are not.
        size: Samples in the block.
        inverse: 1 / size.
        below: The largest offset, over size.
        k: Which samples of the block.
    """
    word = mix(place + hashes + key)
    column = (((word & 0xFFFFFFFF) * (bases * size)) >> 32).to(tl.int32)
    offset = ((word >> 40) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    offset = tl.minimum(offset * inverse, below)
    base = column // size
    # Samples lie side by side, so that a load has many of them; no mask, which would split it.
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
    """Rates, the lower ends of the strata that they divide, and their numbers: [3, M].

    Whole strata below that one are dropped and those above kept; in it the uniform decides, in the
    same arithmetic as on a CPU.

    Args:
        rates: [M], taken as float32.
        size: Strata.

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
    """The largest offset over size that stays in a stratum."""
    return 1.0 / size - 2.0**-23


@dataclasses.dataclass(frozen=True)
class Draws:
    """What kernels need of a plan: its tables of permutations and the keys of its blocks.

    Attributes:
        tables: [blocks, bases, width].
        keys: [blocks] int64.
        blocks: Number of blocks.
        size: Samples of each.
    """

    tables: Tensor
    keys: Tensor
    blocks: int
    size: int

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """Permutations in a table, their stride, size, 1/size and the largest offset."""
        _, bases, width = self.tables.shape
        return bases, width, self.size, 1.0 / self.size, _below(self.size)


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
    width = -(-size // _VECTOR) * _VECTOR + _VECTOR
    found = [permutations(plan.seed, at, size) for at in range(len(spans))]
    tables = torch.zeros(len(spans), len(found[0]), width, dtype=torch.uint8)  # up to 128 strata
    tables[..., :size] = torch.stack(found)
    keys = [block_key(plan, at) for at in range(len(spans))]
    return Draws(tables.to(device), torch.tensor(keys, device=device), len(spans), size)


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
