"""Masks that all examples share, drawn once and kept.

A predictor's masks never change: sample k has the same mask for every input. So each is drawn once
for all K samples, as long as all of them fit a number of bytes: small ones as the factors that
units are multiplied by, large ones on a CPU as bits, which are read much faster than drawn.
Uniforms are hashed coordinate by coordinate, so that a mask for long inputs, cut, is that of
shorter ones.

Legend: K samples, S samples of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from afterdrop.masks.rows import Layout, RowMask, Rows, coordinates
from afterdrop.masks.uniforms import uniforms

_PACKED = 4096  # units per sample from which masks on a CPU are kept as bits


class KeptRowMask(RowMask):
    """A mask that is kept: nothing overwrites it.

    Attributes:
        kept: What units are multiplied by first, 0 where they are dropped; serves all examples.
        factor: What they are multiplied by then; None for 1.
        dtype: Of `mask`.
    """

    kept: Tensor
    factor: float | None
    dtype: torch.dtype

    def __init__(
        self,
        kept: Tensor,
        factor: float | None,
        dtype: torch.dtype,
        rate: float,
        dim: int | None,
        sizes: tuple[int, ...],
    ) -> None:
        values = {"kept": kept, "factor": factor, "dtype": dtype}
        for name, value in (values | {"rate": rate, "dim": dim, "sizes": sizes}).items():
            object.__setattr__(self, name, value)

    @cached_property
    def mask(self) -> Tensor:
        """1 where a unit is kept, 0 where it is dropped."""
        return self.kept.ne(0).to(self.dtype)

    def drop(self, x: Tensor) -> Tensor:
        """Plain dropout, as `RowMask.drop`; writes into neither."""
        dropped = self.unfold(x) * self.kept
        if self.factor is not None:
            dropped.mul_(self.factor)
        return dropped.reshape(x.shape)


class KeptMasks:
    """Draws the masks of rows whose examples all have the same key, and keeps them.

    Args:
        budget: Bytes that may be kept; masks beyond it are drawn again in every pass.

    Attributes:
        bytes: Bytes that are kept.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.bytes = budget, 0
        self._kept: dict[tuple[object, ...], _Masks] = {}

    def clear(self) -> None:
        """Forgets all masks."""
        self._kept.clear()
        self.bytes = 0

    def draw(
        self, rows: Rows, key: int, layout: Layout, like: Tensor, rates: tuple[float, ...]
    ) -> RowMask:
        """The mask of `draw_row_mask` for rows whose examples all have the key of the first.

        Args:
            rows: The rows of this pass, with one multiplier.
            key: The key of the site and call.
            layout: Where the rows lie in `like`.
            like: A tensor of the mask's shape, dtype and device.
            rates: The rate at which the site drops.
        """
        (rate,) = rates
        coords, at = list(like.shape), 0
        flattened: list[int] = []
        if layout.dim is not None:
            coords, at, flattened = coordinates(coords, layout, len(rows))
        kept = self._read(rows, key, layout, like, rate, coords)
        factor = _factor(rate, like.dtype) if kept.dtype == torch.uint8 else None
        if layout.dim is None:
            return KeptRowMask(kept[0, 0], factor, like.dtype, rate, None, ())
        unfolded = [1, len(rows.samples), len(rows.examples)]
        sizes = tuple(flattened + unfolded if at > layout.dim else unfolded + flattened)
        kept = kept.movedim((0, 1), (at, at + 1)).unsqueeze(at)
        return KeptRowMask(kept, factor, like.dtype, rate, layout.dim, sizes)

    def _read(
        self,
        rows: Rows,
        key: int,
        layout: Layout,
        like: Tensor,
        rate: float,
        coords: Sequence[int],
    ) -> Tensor:
        """[S, 1, *coords] of the samples of a pass: factors, or 0 and 1 as bytes."""
        shared = layout.dim is None and not layout.varies
        place = rows.plan, key, rate, like.dtype, like.device, len(coords), shared
        masks = self._kept.get(place)
        if masks is None or not masks.hold(coords):
            sizes = coords if masks is None else [max(p) for p in zip(masks.coords, coords)]
            new = _Masks(key, like, rate, sizes, rows.plan.num_samples, shared=shared)
            if not self._fits(masks, new):
                return _draw(rows, rows.samples, key, like, rate, coords, shared)
            new.draw(rows)
            self._kept[place] = masks = new
        return masks.read(rows.samples, coords)

    def _fits(self, before: _Masks | None, masks: _Masks) -> bool:
        """Counts masks that are kept instead of those before, if the budget allows them."""
        added = masks.bytes - (0 if before is None else before.bytes)
        if self.bytes + added > self.budget:
            return False
        self.bytes += added
        return True


class _Masks:
    """The masks of a site and call for all K samples.

    Args:
        key: The key of the site and call.
        like: A tensor of the masks' dtype and device.
        rate: The rate of dropping.
        coords: Sizes of the dimensions other than the rows.
        num_samples: K.
        shared: Whether all samples have one mask.

    Attributes:
        bytes: Bytes of all of them.
    """

    def __init__(
        self,
        key: int,
        like: Tensor,
        rate: float,
        coords: Sequence[int],
        num_samples: int,
        *,
        shared: bool,
    ) -> None:
        self.coords = tuple(coords)
        self._drawn_with = key, like.new_empty(0), rate, self.coords, shared
        self.packed = like.device.type == "cpu" and math.prod(self.coords) >= _PACKED
        *outer, last = self.coords or (1,)
        self._shape = num_samples, 1, *outer, -(-last // 8) if self.packed else last
        self.bytes = math.prod(self._shape) * (1 if self.packed else like.element_size())

    def hold(self, coords: Sequence[int]) -> bool:
        """Whether inputs of these sizes find their masks here."""
        return all(have >= wanted for have, wanted in zip(self.coords, coords))

    def draw(self, rows: Rows) -> None:
        """Draws the masks, those of one sample after the other if they are packed."""
        samples = range(rows.plan.num_samples)
        if not self.packed:
            self._kept = _draw(rows, samples, *self._drawn_with)
            return
        self._bits = np.empty(self._shape, np.uint8)
        for k in samples:
            factors = _draw(rows, samples[k : k + 1], *self._drawn_with)
            self._bits[k] = np.packbits(factors.ne(0).numpy(), axis=-1)[0]

    def read(self, samples: range, coords: Sequence[int]) -> Tensor:
        """[S, 1, *coords] of some samples, possibly of shorter inputs."""
        part = slice(samples.start, samples.stop), slice(None), *map(slice, coords)
        if not self.packed:
            return self._kept[part]
        bits = self._bits[part[:-1]]
        return torch.from_numpy(np.unpackbits(bits, axis=-1, count=coords[-1]))


def _factor(rate: float, dtype: torch.dtype) -> float:
    """1/(1 − rate), rounded as `RowMask.drop` rounds it."""
    return torch.ones((), dtype=dtype).div_(1.0 - rate).item()


def _draw(
    rows: Rows,
    samples: range,
    key: int,
    like: Tensor,
    rate: float,
    coords: Sequence[int],
    shared: bool,
) -> Tensor:
    """[S, 1, *coords] what units are multiplied by, of the first example."""
    examples = None if shared else rows.examples[:1]
    u = uniforms(rows.plan, key, samples, examples, coords, like.device)
    mask = torch.ge(u, rate, out=torch.empty(u.shape, dtype=like.dtype, device=like.device))
    return mask.div_(1.0 - rate)
