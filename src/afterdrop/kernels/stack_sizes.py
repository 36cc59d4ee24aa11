"""Sizes of the programs of an LSTM stack.

With few rows a tick is limited by reading the weights, so programs are small and there is one for
each multiprocessor. With many rows (large batches, several samples) it is limited by products, so
their tiles are large and products are not split.

Letters: H hidden units (padded), L layers, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import triton

SMALL = {"BLOCK_U": 16, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4, "EARLY": True}
# Each of these programs occupies a whole multiprocessor and its shared memory.
LONG = {"BLOCK_U": 16, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4, "EARLY": True}
WIDE = {"BLOCK_U": 32, "BLOCK_K": 128, "num_warps": 8, "num_stages": 4, "EARLY": True}
_PRODUCTS = {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
_LARGE_BYTES = 200 * 2**10  # shared memory that the largest programs need
MANY_ROWS = 512  # from here on products limit a tick


@dataclass(frozen=True)
class StackSizes:
    """Sizes of forward programs and of the products of backward ticks.

    Attributes:
        rows: Rows per program, of both.
        forward: Units per gate and inner length per program.
        products: Columns and inner length per program.
        splits: Parts of a backward product along its inner length, so that there are enough
            programs.
    """

    rows: int
    forward: dict[str, int] = field(default_factory=lambda: SMALL)
    products: dict[str, int] = field(default_factory=lambda: _PRODUCTS)
    splits: int = 4


# Tiles of 128 × 256, because the second-level cache limits smaller ones. What the cell reads is
# loaded after the products, or it would take registers from them.
_LARGE = {"BLOCK_K": 64, "num_warps": 8}
MANY = StackSizes(
    rows=128,
    forward={"BLOCK_U": 64, "num_stages": 4, "EARLY": False, **_LARGE},
    products={"BLOCK_N": 256, "num_stages": 3, **_LARGE},
    splits=2,
)


def stack_sizes(hidden: int, layers: int, rows: int, processors: int, memory: int) -> StackSizes:
    """The sizes for a stack on a GPU.

    Args:
        hidden: H, padded.
        layers: L.
        rows: B.
        processors: Number of multiprocessors.
        memory: Bytes of shared memory of each.

    Example:
        >>> stack_sizes(736, 4, 64, 132, 2**18).forward["BLOCK_U"]
        32
        >>> stack_sizes(960, 2, 1024, 132, 2**18) == MANY
        True
    """
    large = memory >= _LARGE_BYTES
    if rows >= MANY_ROWS and large:
        units = 64 if hidden % 64 == 0 else 32  # a divisor of the units
        return replace(MANY, forward=MANY.forward | {"BLOCK_U": units})
    block = min(64, max(16, triton.next_power_of_2(rows)))
    blocks = layers * -(-rows // block)
    for forward in (LONG, WIDE):
        if hidden // forward["BLOCK_U"] * blocks <= processors and large:
            return StackSizes(block, forward)
    return StackSizes(block)
