"""The integer arithmetic of Latin hypercube draws in NumPy, for few units: the same to the bit.

A pass of a model with thousands of small dropout sites consists of tiny operations, and NumPy's
take a third of the time of torch's. Words are unsigned here: shifts are logical, products wrap.

Legend: B examples, `coords` sizes of the other dimensions.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]

LIMIT = 4096  # units per sample up to which NumPy is faster
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
_SHIFTS = [np.uint64(shift) for shift in (30, 27, 31)]
_FACTORS = [np.uint64(factor) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
_LOW, _HALF, _TOP = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(40)


def _mix(x: Words) -> Words:
    """The bijective 64-bit finaliser of splitmix64."""
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    return x ^ (x >> _SHIFTS[2])


def _word(number: int) -> np.uint64:
    return np.uint64(number & 2**64 - 1)


@lru_cache(maxsize=256)
def _hashed(dim: int, dims: int, size: int) -> Words:
    """The term of the positions along a dimension, in the shape of the units of an example."""
    shape = [1] * (dims + 1)
    shape[dim + 1] = size
    return _mix(np.arange(size, dtype=np.uint64) * _word(_GOLDEN) + _word(dim + 1)).reshape(shape)


@lru_cache(maxsize=16)
def _mixed(numbers: bytes) -> Words:
    """The examples' own terms: the same for all sites of a pass."""
    return _mix(np.frombuffer(numbers, np.uint64))


def unit_words(keys: Sequence[int], examples: Tensor | None, coords: Sequence[int]) -> Words:
    """A 64-bit word per site and unit [sites, B, *coords], as `uniforms` has them."""
    numbers = bytes(8) if examples is None else examples.numpy().tobytes()
    own = np.array([key & 2**64 - 1 for key in keys], np.uint64)[:, None]
    words = _mix(_mixed(numbers) + own).reshape(len(keys), -1, *[1] * len(coords))
    for dim, size in enumerate(coords):
        words = words + _hashed(dim, len(coords), size)
    return words


def columns_and_offsets(
    words: Words, key: int, columns: int, size: int, highest: float
) -> tuple[Tensor, Tensor]:
    """Where the units of a block are in its table of permutations, and in their strata.

    Args:
        words: Of the units.
        key: Of the block.
        columns: Columns of its table.
        size: Samples of the block.
        highest: The largest offset.

    Returns:
        The column of each unit, flat, and its offset, in the shape of the units.
    """
    words = _mix(words + _word(key))
    column = ((words & _LOW) * np.uint64(columns)) >> _HALF
    fraction = (words >> _TOP).astype(np.float32) * np.float32(2.0**-24)
    offset = np.minimum(fraction * np.float32(1.0 / size), np.float32(highest))
    return torch.from_numpy(column.astype(np.int32).ravel()), torch.from_numpy(offset)
