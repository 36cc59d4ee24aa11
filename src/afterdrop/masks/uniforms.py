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
Samples that are "given" (the models of an ensemble) are not drawn at all.
"""

import dataclasses
import hashlib
import itertools
import math
import mmap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.masks import small_draws
from afterdrop.masks.small_draws import Words
from afterdrop.masks.thread_lock import ThreadLock

Scheme = Literal["lhs", "iid", "antithetic", "given"]
SCHEMES: tuple[Scheme, ...] = ("lhs", "iid", "antithetic")  # those that are drawn

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed 64-bit integer
# The longest Latin hypercube; longer halves consist of several. The longer it is, the fewer base
# permutations fit the table, and two units with rotations of the same one are dependent in every
# sample. With 128 samples this adds a sixth to the variance of a statistic of pairs of units; with
# 512 the variance would be nearly four times as large, and not smaller than with 256.
_BLOCK_LIMIT = 128
_KEPT_SIZE = 4096  # positions whose terms are kept: 32 KiB each
_TABLE_COLUMNS = 32768  # permutations per table: one pair of units in 32768 shares one


@dataclasses.dataclass(frozen=True)
class Plan:
    """The samples of an evaluation: their number, how they are drawn, and the independent blocks.

    Args:
        num_samples: K, an even number (two halves) or 1.
        seed: Any integer.
        scheme: "lhs", "iid" or "antithetic"; "given" for samples that are not drawn.
        blocks: The number of independent blocks, a power of two. 2 gives the halves; more also give
            a curve over K, whose points merge blocks (a prefix of a Latin hypercube is not one). Of
            given samples, the groups of a jackknife (`family.estimates`): from 2 to K.

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
        if self.scheme not in (*SCHEMES, "given"):
            raise DataError(f"masks={self.scheme!r} must be one of {', '.join(SCHEMES)}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise DataError(f"seed={self.seed!r} must be an integer")
        if not -(2**63) <= self.seed < 2**63:
            raise DataError("seed must fit 64 bits; give a smaller integer")
        if isinstance(self.num_samples, bool) or not isinstance(self.num_samples, int):
            raise DataError(f"num_samples={self.num_samples!r} must be an integer")
        if self.num_samples < 1:
            raise DataError(f"num_samples={self.num_samples} must be at least 1")
        if self.num_samples == 1:
            object.__setattr__(self, "blocks", 1)
            return
        if self.scheme == "given":
            if not 1 <= self.blocks <= self.num_samples:
                raise DataError(
                    f"groups={self.blocks} of {self.num_samples} given samples must be from 2 to "
                    f"{self.num_samples}"
                )
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
        edges = [round(i * self.num_samples / self.blocks) for i in range(self.blocks + 1)]
        return tuple(range(a, b) for a, b in itertools.pairwise(edges))

    @property
    def num_halves(self) -> int:
        """Two halves, or the groups of a jackknife over given samples."""
        return self.blocks if self.scheme == "given" else 2


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
    if sites_at_once(plan, examples, coords, device):
        return small_uniforms(plan, (key,), samples, examples, coords)[:, 0]
    shape = len(samples), 1 if examples is None else len(examples), *coords
    drawn = torch.empty(shape, dtype=torch.float32, device=device)
    _fill(plan, samples, _coordinates(key, examples, coords, device), drawn)
    return drawn


def sites_at_once(
    plan: Plan,
    examples: Tensor | None,
    coords: Sequence[int],
    device: torch.device | str = "cpu",
) -> int:
    """How many sites `small_uniforms` should serve at once; 0 if `uniforms` is faster or needed.

    Example:
        >>> sites_at_once(Plan(4), torch.arange(4), (64,)), sites_at_once(Plan(4), None, (5000,))
        (16, 0)
    """
    if plan.scheme != "lhs" or torch.device(device).type != "cpu":
        return 0
    return small_draws.LIMIT // max(
        1, math.prod(coords) * (1 if examples is None else len(examples))
    )


def small_uniforms(
    plan: Plan,
    keys: Sequence[int],
    samples: range,
    examples: Tensor | None,
    coords: Sequence[int],
) -> Tensor:
    """The draws of `uniforms` for several sites with few units each, on a CPU, by Latin hypercubes.

    Args:
        plan: The number of samples and the seed.
        keys: Of the sites, from `site_key`.
        samples: The indices of the S samples to draw.
        examples: [B] numbers of the examples, or None for draws that all examples share.
        coords: The sizes of the dimensions inside an example.

    Returns:
        [S, sites, B, *coords], with B = 1 if `examples` is None.
    """
    units = small_draws.unit_words(keys, examples, coords)
    drawn = torch.empty((len(samples), *units.shape), dtype=torch.float32, device="cpu")
    _fill(plan, samples, units, drawn)
    return drawn


def _fill(plan: Plan, samples: range, units: Tensor | Words, drawn: Tensor) -> None:
    """Writes the draws of units into `drawn` [S, *units]."""
    draw: Any = _latin if plan.scheme == "lhs" else _independent
    for block, span in enumerate(blocks(plan)):
        inside = range(max(samples.start, span.start), min(samples.stop, span.stop))
        if len(inside):
            local = range(inside.start - span.start, inside.stop - span.start)
            out = drawn[inside.start - samples.start : inside.stop - samples.start]
            draw(plan, block, len(span), local, units, out)


@lru_cache(maxsize=64)
def blocks(plan: Plan) -> tuple[range, ...]:
    """The independent blocks, split further where longer than the longest Latin hypercube.

    Example:
        >>> blocks(Plan(4))
        (range(0, 2), range(2, 4))
    """
    if plan.scheme == "given":
        raise DataError(f"masks='given' cannot be drawn; use one of {', '.join(SCHEMES)}")
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
    x = (x >> 30).bitwise_and_(0x3FFFFFFFF).bitwise_xor_(x).mul_(-0x40A7B892E31B1A47)
    x = (x >> 27).bitwise_and_(0x1FFFFFFFFF).bitwise_xor_(x).mul_(-0x6B2FB644ECCEEE15)
    return (x >> 31).bitwise_and_(0x1FFFFFFFF).bitwise_xor_(x)


def _coordinates(
    key: int, examples: Tensor | None, coords: Sequence[int], device: torch.device | str
) -> Tensor:
    """A 64-bit word per unit [B, *coords]: the sum of one hashed word per coordinate.

    Unlike a number per unit, this sum does not change when an example is padded to another length.
    """
    if examples is None:
        examples = torch.zeros(1, dtype=torch.int64, device=device)
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
    """The term of the positions [size] along a dimension in the words of units. Not to be changed.

    Example:
        >>> hashed(0, 3, "cpu") is hashed(0, 3, "cpu")
        True
    """
    known = _hashed if size <= _KEPT_SIZE else _hashed.__wrapped__
    return known(dim, size, device)


@lru_cache(maxsize=64)
def _hashed(dim: int, size: int, device: torch.device | str) -> Tensor:
    return _mix(torch.arange(size, device=device) * _GOLDEN + (dim + 1))


@lru_cache(maxsize=512)
def block_key(plan: Plan, block: int) -> int:
    """The key of a block of Latin hypercube samples."""
    return site_key(plan.seed, "lhs", block)


def _fraction(words: Tensor) -> Tensor:
    """The top 24 bits as a float in [0, 1): exact in float32."""
    return ((words >> 40) & 0xFFFFFF).float().mul_(2.0**-24)


def _latin(
    plan: Plan, block: int, size: int, local: range, units: Tensor | Words, out: Tensor
) -> None:
    """Writes the samples `local` of a Latin hypercube of `size` into `out` [S, *units]."""
    key, highest = block_key(plan, block), _below(1.0 / size)
    table = _tables.table(plan.seed, block, size, out.device)
    if isinstance(units, Tensor):
        words = _mix(units + key)
        column = (((words & 0xFFFFFFFF) * table.shape[1]) >> 32).int().flatten()
        offset = _fraction(words).mul_(1.0 / size).clamp_max_(highest)
    else:
        columns = table.shape[1]
        column, offset = small_draws.columns_and_offsets(units, key, columns, size, highest)
    rows = table[local.start : local.stop]
    torch.index_select(rows, 1, column, out=out.view(len(local), -1))
    out.add_(offset)


def _below(value: float) -> float:
    """The largest offset that rounding cannot carry into the next stratum (or to 1)."""
    return value - 2.0**-23


def _columns(size: int) -> int:
    """How many permutations a table has: bases, each in all its rotations."""
    return size * max(1, _TABLE_COLUMNS // size)


def permutations(seed: int, block: int, size: int) -> Tensor:
    """[bases, size] random permutations of the strata; their rotations are the table's columns."""
    generator = torch.Generator().manual_seed(
        site_key(seed, "permutations", block, size) & 2**63 - 1
    )
    bases = _columns(size) // size
    # torch.rand could be intercepted here: tables are made while a model runs under control.
    draw = torch.ops.aten.rand.generator([bases, size], generator=generator, dtype=torch.float64)
    return draw.argsort(-1)


class _Tables:
    """The tables of Latin hypercubes used last, up to a number of bytes; at least two (halves)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept: dict[tuple[object, ...], Tensor] = {}  # the one used last is the last
        self._lock = ThreadLock()

    def table(self, seed: int, block: int, size: int, device: torch.device) -> Tensor:
        """[size, columns] strata / size: random permutations and all their rotations."""
        place = seed, block, size, device
        with self._lock:
            table = self._kept.pop(place, None)
            if table is None:
                self._make_room(4 * size * _columns(size))
                table = _rotations(permutations(seed, block, size)).to(device)
            self._kept[place] = table
        return table

    def _make_room(self, size: int) -> None:
        while self._kept and size + sum(table.nbytes for table in self._kept.values()) > self.limit:
            del self._kept[next(iter(self._kept))]


_tables = _Tables(2 * 4 * _BLOCK_LIMIT * _TABLE_COLUMNS)  # 32 MiB: two of the largest


def table_bytes(plan: Plan) -> int:
    """The bytes that tables of Latin hypercubes take together in an evaluation: up to 32 MiB.

    Example:
        >>> round(table_bytes(Plan(100)) / 2**20, 1)
        12.5
    """
    if plan.scheme != "lhs":
        return 0
    sizes = (len(span) for span in blocks(plan))
    return min(_tables.limit, sum(4 * size * _columns(size) for size in sizes))


def _rotations(base: Tensor) -> Tensor:
    """The table of permutations [bases, size], made row by row: temporary copies stay small."""
    bases, size = base.shape
    first = base.t().float().unsqueeze(-1)
    shifts = torch.arange(size, dtype=torch.float32, device="cpu")
    # In pages of its own: freed tables would leave holes in the heap.
    room = mmap.mmap(-1, 4 * size * bases * size)
    table = torch.frombuffer(room, dtype=torch.float32).view(size, bases, size)
    for k in range(size):
        row = torch.add(first[k], shifts, out=table[k])
        row.sub_(row.ge(size).float(), alpha=size)
    return table.div_(size).view(size, -1)


def _independent(
    plan: Plan, block: int, size: int, local: range, units: Tensor, out: Tensor
) -> None:
    """Writes independent samples, or antithetic pairs of them, into `out` [S, *units]."""
    pairs = plan.scheme == "antithetic"
    for k, u in zip(local, out):
        number = k // 2 if pairs else k
        u.copy_(_fraction(_mix(units + site_key(plan.seed, plan.scheme, block, number))))
        if pairs and k % 2:
            torch.sub(1.0 - 2.0**-24, u, out=u)
