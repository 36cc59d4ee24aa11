"""Logits of mask samples, their log-sum-exp and their entropy, in one matrix product.

A program that has computed a tile of logits x writes it, and for every row of the tile Σ 2^x and
Σ 2^x · x, which `_rows` combines. Logits are to base 2, which saves a multiplication per logit. No
maximum is subtracted from x: a row whose log-sum-exp, to base e, lies outside −64 to 82 gets NaN,
which then appears in `lowest` of `family_sums`. Programs are persistent and process one tile after
another, so that the operands of the next tile load during the current one.

Letters: R rows (targets × samples), E features, V classes, V₊ columns of the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from afterdrop.kernels.family_sums import OF_SAMPLES
from afterdrop.kernels.gpu_properties import processors
from afterdrop.kernels.log_constants import LN2

# Sizes of programs, the largest first. Shared memory holds the stages and a tile of the logits.
_SIZES = (
    {"BLOCK_R": 128, "BLOCK_V": 256, "BLOCK_E": 32, "num_warps": 8, "num_stages": 6},
    {"BLOCK_R": 128, "BLOCK_V": 128, "BLOCK_E": 32, "num_warps": 4, "num_stages": 3},
    {"BLOCK_R": 64, "BLOCK_V": 64, "BLOCK_E": 32, "num_warps": 4, "num_stages": 2},
)
_BARRIERS = 1024  # bytes of shared memory for barriers
_GROUP = 64  # tiles of rows per group, which share rows of the table in the L2 cache
_ROWS = {"BLOCK": 8, "num_warps": 4}  # rows per program that combines tiles


@triton.jit
def _tile(number, tiles_r, tiles_v, GROUP: tl.constexpr):
    """The row and column of a tile, in the order of groups of rows."""
    first = number // (GROUP * tiles_v) * GROUP
    size = tl.minimum(tiles_r - first, GROUP)
    within = number % (GROUP * tiles_v)
    return first + within % size, within // size


@triton.jit
def _sums(x):
    """Σ 2^x and Σ 2^x · x of each row."""
    terms = tl.exp2(x)
    return tl.sum(terms, 1), tl.sum(terms * x, 1)


@triton.jit
def _products(
    features,  # descriptors of [R, E]
    table,  # [V₊, E]
    logits,  # [R, V₊]
    statistics,  # [2, tiles of V, R]
    R,
    V,
    tiles_r,
    tiles_v,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    for number in tl.range(tl.program_id(0), tiles_r * tiles_v, tl.num_programs(0), flatten=True):
        at_r, at_v = _tile(number, tiles_r, tiles_v, GROUP)
        total = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
        for e in range(0, E, BLOCK_E):
            x = features.load([at_r * BLOCK_R, e])
            w = table.load([at_v * BLOCK_V, e])
            total = tl.dot(x, w.T, total, input_precision="ieee")
        rounded = total.to(logits.dtype)
        logits.store([at_r * BLOCK_R, at_v * BLOCK_V], rounded)
        x = rounded.to(tl.float32)
        # Both branches compute sums: a tile chosen by a branch would need registers of its own.
        if at_v == tiles_v - 1:
            inside = at_v * BLOCK_V + tl.arange(0, BLOCK_V) < V
            own = tl.where(inside[None, :], x, -1e30)  # not −inf, which times 0 is NaN
            plain, weighted = _sums(own)
        else:
            plain, weighted = _sums(x)
        row = at_r * BLOCK_R + tl.arange(0, BLOCK_R)
        at = statistics + at_v * R + row
        tl.store(at, plain, mask=row < R)
        tl.store(at + tiles_v * R, weighted, mask=row < R)


@triton.jit
def _rows(
    logits,
    targets,
    statistics,
    lse,
    chosen,
    entropies,
    R,
    tiles,
    stride,
    K,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes what `sample_sums.row_lse` does, with the log-sum-exp to base 2."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.arange(0, TILES)[:, None]
    real = row < R
    inside = (tile < tiles) & real[None, :]
    at = statistics + tile * R + row[None, :]
    total = tl.sum(tl.load(at, mask=inside, other=0.0), 0)
    weighted = tl.sum(tl.load(at + tiles * R, mask=inside, other=0.0), 0)
    target = tl.load(targets + row // K, mask=real, other=0)
    own = tl.load(logits + row.to(tl.int64) * stride + target, mask=real, other=0.0)
    # Below this range small terms underflow, above it the weighted sum overflows.
    held = (total > 1e-28) & (total < 1e36)
    found = tl.where(held, tl.log2(total), float("nan"))
    tl.store(lse + row, found, mask=real)
    tl.store(chosen + row, (own.to(tl.float32) - found) * LN2, mask=real)
    tl.store(entropies + row, (found - weighted / total) * LN2, mask=real)


class FamilyLogits:
    """Computes the logits of some targets at a time.

    Args:
        table: [V₊, E] log2 e times the softmax's table, with its bias in columns; V₊ and E are
            multiples of 8.
        classes: V.
        targets: The largest number of targets at a time.
        samples: K.
        group: Tiles of rows per group.
    """

    def __init__(
        self, table: Tensor, classes: int, targets: int, samples: int, *, group: int = _GROUP
    ) -> None:
        self.table, self.classes, self.samples, self.group = table, classes, samples, group
        self.programs, memory = processors(table.device)
        self.sizes = program_sizes(table.element_size(), memory)
        rows, self.tiles = targets * samples, -(-len(table) // self.sizes["BLOCK_V"])
        self._logits = table.new_empty(rows, len(table))
        self._statistics = torch.empty(2 * self.tiles * rows, device=table.device)

    def product(
        self, features: Tensor, targets: Tensor, lse: Tensor, found: dict[str, Tensor]
    ) -> Tensor:
        """The logits [R, V₊] to base 2, in memory that the next call overwrites.

        Args:
            features: [R, E], samples innermost.
            targets: [R / K].
            lse: [R] the log-sum-exp to base 2, written.
            found: `OF_SAMPLES` [R / K, K], written.
        """
        R, logits, sizes = len(features), self._logits[: len(features)], self.sizes
        rows = -(-R // sizes["BLOCK_R"])
        tile = sizes["BLOCK_R"], sizes["BLOCK_V"]
        programs = self.programs or 2  # the interpreter has no multiprocessors
        _products[(min(rows * self.tiles, programs),)](
            TensorDescriptor.from_tensor(features, [tile[0], sizes["BLOCK_E"]]),
            TensorDescriptor.from_tensor(self.table, [tile[1], sizes["BLOCK_E"]]),
            TensorDescriptor.from_tensor(logits, [*tile]),
            self._statistics,
            R,
            self.classes,
            rows,
            self.tiles,
            E=features.shape[1],
            GROUP=self.group,
            **sizes,
        )
        _rows[(-(-R // _ROWS["BLOCK"]),)](
            logits,
            targets,
            self._statistics,
            lse,
            *(found[name] for name in OF_SAMPLES),
            R,
            self.tiles,
            logits.stride(0),
            self.samples,
            TILES=triton.next_power_of_2(self.tiles),
            **_ROWS,
        )
        return logits


def program_sizes(bytes_each: int, memory: int) -> dict[str, int]:
    """Sizes of programs whose operands and logits fit into shared memory.

    Args:
        bytes_each: Bytes per element.
        memory: Bytes of shared memory per program; 0 in the interpreter.

    Example:
        >>> [program_sizes(2, memory)["num_stages"] for memory in (232448, 101376)]
        [6, 3]
    """
    for found in _SIZES:
        rows, classes, depth = found["BLOCK_R"], found["BLOCK_V"], found["BLOCK_E"]
        stages = found["num_stages"] * (rows + classes) * depth
        if (stages + rows * classes) * bytes_each + _BARRIERS <= memory:
            return found
    return _SIZES[-1]
