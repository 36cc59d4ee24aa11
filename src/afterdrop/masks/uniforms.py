"""Counter-based uniform draws: they depend on what they are for, not on when they are made.

Every number is a pure function of (seed, site, call, sample, example, coordinates in the example).
Masks are thus the same for any batch size, chunking, order of evaluation and device. All arithmetic
is on integers, so that a CPU and a GPU agree to the bit. One uniform serves every multiplier: a
unit is dropped when u < multiplier · rate, which makes members at neighbouring multipliers
comparable.

Legend: K samples, S samples of this call, B examples, `coords` sizes of the other dimensions.

Schemes, each with two independent halves (the bias correction and the mask error need them):
    lhs         Latin hypercube over the samples of a block: u = (π(k) + v)/K' with a permutation π
                of the K' strata and an offset v per unit; every unit is dropped in the expected
                share of the samples. π is a column of a table of permutations and all their
                rotations, so that each sample sees all strata equally often.
    iid         independent uniforms
    antithetic  pairs u, 1 − u
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from afterdrop.errors import DataError

Scheme = Literal["lhs", "iid", "antithetic"]
SCHEMES: tuple[Scheme, ...] = ("lhs", "iid", "antithetic")

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit integer
# The longest Latin hypercube; longer halves consist of several. The longer it is, the fewer base
# permutations fit the table, and two units with rotations of the same one are dependent in every
# sample. With 128 samples this adds a sixth to the variance of a statistic of pairs of units; with
# 512 the variance would be nearly four times as large, and not smaller than with 256.
_BLOCK_LIMIT = 128
_TABLE_COLUMNS = 32768  # permutations per table: one pair of units in 32768 shares one


@dataclasses.dataclass(frozen=True)
class Plan:
    """The samples of an evaluation: their number, how they are drawn, and the independent blocks.

    Args:
        num_samples: K, an even number (two halves) or 1.
        seed: Any integer.
        scheme: "lhs", "iid" or "antithetic".
        blocks: The number of independent blocks, a power of two. 2 gives the halves; more also give
            a curve over K, whose points merge blocks (a prefix of a Latin hypercube is not one).

    Raises:
        DataError: If the numbers are not compatible; the message suggests some that are.

    Example:
        >>> Plan(100).spans
        (range(0, 50), range(50, 100))
    """

    num_samples: int
    seed: int = 0
    scheme: Scheme = "lhs"
    blocks: int = 2

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise DataError(f"masks={self.scheme!r} must be one of {', '.join(SCHEMES)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise DataError(f"seed={self.seed!r} must be an integer")
        if isinstance(self.num_samples, bool) or not isinstance(self.num_samples, int):
            raise DataError(f"num_samples={self.num_samples!r} must be an integer")
        if self.num_samples < 1:
            raise DataError(f"num_samples={self.num_samples} must be at least 1")
        if self.num_samples == 1:
            object.__setattr__(self, "blocks", 1)
            return
        if self.blocks < 2 or self.blocks & (self.blocks - 1):
            raise DataError(f"blocks={self.blocks} must be a power of two, at least 2")
        step = self.blocks * (2 if self.scheme == "antithetic" else 1)
        if self.num_samples % step:
            near = max(step, round(self.num_samples / step) * step)
            raise DataError(
                f"num_samples={self.num_samples} must be a positive multiple of {step} "
                f"({self.blocks} independent blocks of {self.scheme} samples) or 1; try {near}"
            )

    @property
    def spans(self) -> tuple[range, ...]:
        """The samples of each independent block."""
        if self.num_samples == 1:
            return (range(1),)
        size = self.num_samples // self.blocks
        return tuple(range(i * size, (i + 1) * size) for i in range(self.blocks))


def site_key(seed: int, *parts: object) -> int:
    """A 64-bit key of a site and call: a cryptographic hash, so that all sites are independent.

    Example:
        >>> site_key(0, "encoder.dropout", 0) != site_key(0, "encoder.dropout", 1)
        True
    """
    text = "\x1f".join(map(str, (seed, *parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def uniforms(
    plan: Plan,
    key: int,
    samples: range,
    examples: Tensor | None,
    coords: Sequence[int],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Uniforms in [0, 1), float32.

    Args:
        plan: The number of samples, the seed and the scheme.
        key: From `site_key`.
        samples: The indices of the S samples to draw.
        examples: [B] numbers of the examples, or None for draws that all examples share.
        coords: The sizes of the dimensions inside an example.
        device: The device of the result.

    Returns:
        [S, B, *coords], with B = 1 if `examples` is None.

    Example:
        >>> u = uniforms(Plan(4), site_key(0, "a"), range(4), torch.tensor([7]), (3,))
        >>> u.shape
        torch.Size([4, 1, 3])
        >>> bool((u[:2].sort(0).values.mul(2).long() == torch.tensor([0, 1]).view(2, 1, 1)).all())
        True
    """
    units = _coordinates(key, examples, coords, device)
    pieces = []
    for block, span in enumerate(blocks(plan)):
        inside = range(max(samples.start, span.start), min(samples.stop, span.stop))
        if len(inside):
            local = range(inside.start - span.start, inside.stop - span.start)
            draw = _latin if plan.scheme == "lhs" else _independent
            pieces.append(draw(plan, block, len(span), local, units))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@lru_cache(maxsize=64)
def blocks(plan: Plan) -> tuple[range, ...]:
    """The independent blocks, split further where longer than the longest Latin hypercube.

    Example:
        >>> blocks(Plan(4))
        (range(0, 2), range(2, 4))
    """
    found: list[range] = []
    for span in plan.spans:
        fewest = math.ceil(len(span) / _BLOCK_LIMIT) if plan.scheme == "lhs" else 1
        even = (n for n in range(fewest, 2 * fewest + 1) if len(span) % n == 0)
        parts = next(even, fewest)
        edges = [span.start + round(i * len(span) / parts) for i in range(parts + 1)]
        found += [range(a, b) for a, b in itertools.pairwise(edges)]
    return tuple(found)


def _mix(x: Tensor) -> Tensor:
    """The bijective 64-bit finaliser of splitmix64; `&` makes the arithmetic shifts logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _coordinates(
    key: int, examples: Tensor | None, coords: Sequence[int], device: torch.device | str
) -> Tensor:
    """A 64-bit word per unit [B, *coords]: the sum of one hashed word per coordinate.

    Unlike a number per unit, this sum does not change when an example is padded to another length.
    """
    if examples is None:
        examples = torch.zeros(1, dtype=torch.int64)
    words = unit_words(key, examples.to(device)).view(-1, *[1] * len(coords))
    for dim, size in enumerate(coords):
        shape = [1] * (len(coords) + 1)
        shape[dim + 1] = size
        words = words + hashed(dim, size, device).view(shape)
    return words


def unit_words(key: int | Tensor, examples: Tensor) -> Tensor:
    """The term of the examples [B] in the words of their units; [S, B] for keys [S, 1]."""
    return _mix(_mix(examples) + key)


def hashed(dim: int, size: int, device: torch.device | str) -> Tensor:
    """The term of the positions [size] along a dimension in the words of units."""
    return _mix(torch.arange(size, device=device) * _GOLDEN + (dim + 1))


def block_key(plan: Plan, block: int) -> int:
    """The key of a block of Latin hypercube samples."""
    return site_key(plan.seed, "lhs", block)


def _fraction(words: Tensor) -> Tensor:
    """The top 24 bits as a float in [0, 1): exact in float32."""
    return ((words >> 40) & 0xFFFFFF).float().mul_(2.0**-24)


def _latin(plan: Plan, block: int, size: int, local: range, units: Tensor) -> Tensor:
    words = _mix(units + block_key(plan, block))
    table = _table(plan.seed, block, size, units.device)[local.start : local.stop]
    column = (((words & 0xFFFFFFFF) * table.shape[1]) >> 32).int().flatten()
    offset = _fraction(words).mul_(1.0 / size).clamp_max_(_below(1.0 / size))
    strata = table.index_select(1, column).view(len(local), *units.shape)
    return strata.add_(offset)


def _below(value: float) -> float:
    """The largest offset that rounding cannot carry into the next stratum (or to 1)."""
    return value - 2.0**-23


def permutations(seed: int, block: int, size: int) -> Tensor:
    """[bases, size] random permutations of the strata; their rotations are the table's columns."""
    generator = torch.Generator().manual_seed(
        site_key(seed, "permutations", block, size) & 2**63 - 1
    )
    bases = max(1, _TABLE_COLUMNS // size)
    # torch.rand could be intercepted here: tables are made while a model runs under control.
    draw = torch.ops.aten.rand.generator([bases, size], generator=generator, dtype=torch.float64)
    return draw.argsort(-1)


@lru_cache(maxsize=16)
def _table(seed: int, block: int, size: int, device: torch.device) -> Tensor:
    """[size, columns] strata / size: random permutations and all their rotations."""
    base = permutations(seed, block, size)
    rotated = (base.t().unsqueeze(-1) + torch.arange(size)) % size
    return rotated.reshape(size, len(base) * size).float().div_(size).to(device)


def _independent(plan: Plan, block: int, size: int, local: range, units: Tensor) -> Tensor:
    pairs = plan.scheme == "antithetic"
    drawn = []
    for k in local:
        number = k // 2 if pairs else k
        u = _fraction(_mix(units + site_key(plan.seed, plan.scheme, block, number)))
        drawn.append((1.0 - 2.0**-24) - u if pairs and k % 2 else u)
    return torch.stack(drawn)
