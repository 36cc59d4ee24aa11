"""Masks that all examples share, drawn once and kept.

A predictor's masks never change: sample k has the same mask for every input. So each is drawn once
for all K samples, with the factor of what is kept, as long as all of them fit a number of bytes.
Uniforms are hashed coordinate by coordinate, so that a mask for long inputs, cut, is that of
shorter ones.

Legend: K samples, S samples of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from afterdrop.masks.rows import Layout, RowMask, Rows, coordinates
from afterdrop.masks.uniforms import uniforms


class ScaledRowMask(RowMask):
    """A mask that is kept: nothing overwrites it.

    Attributes:
        scaled: 1/(1 − rate) where a unit is kept, 0 where it is dropped; serves all examples.
    """

    scaled: Tensor

    def __init__(
        self, scaled: Tensor, rate: float, dim: int | None, sizes: tuple[int, ...]
    ) -> None:
        values = {"scaled": scaled, "rate": rate, "dim": dim, "sizes": sizes}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @cached_property
    def mask(self) -> Tensor:
        """1 where a unit is kept, 0 where it is dropped."""
        return self.scaled.ne(0).to(self.scaled.dtype)

    def drop(self, x: Tensor) -> Tensor:
        """Plain dropout, as `RowMask.drop`; writes into neither."""
        return (self.unfold(x) * self.scaled).reshape(x.shape)


class KeptMasks:
    """Draws the masks of rows whose examples all have the same key, and keeps them.

    Args:
        budget: Bytes that may be kept; masks beyond it are drawn again in every pass.

    Attributes:
        bytes: Bytes that are kept.
    """

    def __init__(self, budget: int) -> None:
        self.budget, self.bytes = budget, 0
        self._kept: dict[tuple[object, ...], Tensor] = {}

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
        if layout.dim is None:
            scaled = self._scaled(rows, key, layout, like, rate, like.shape)
            return ScaledRowMask(scaled[0, 0], rate, None, ())
        coords, at, flattened = coordinates(list(like.shape), layout, len(rows))
        scaled = self._scaled(rows, key, layout, like, rate, coords)
        unfolded = [1, len(rows.samples), len(rows.examples)]
        sizes = tuple(flattened + unfolded if at > layout.dim else unfolded + flattened)
        scaled = scaled.movedim((0, 1), (at, at + 1)).unsqueeze(at)
        return ScaledRowMask(scaled, rate, layout.dim, sizes)

    def _scaled(
        self,
        rows: Rows,
        key: int,
        layout: Layout,
        like: Tensor,
        rate: float,
        coords: Sequence[int],
    ) -> Tensor:
        """[S, 1, *coords] factors of the samples of a pass."""
        shared = layout.dim is None and not layout.varies
        place = rows.plan, key, rate, like.dtype, like.device, len(coords), shared
        kept = self._kept.get(place)
        if kept is None or any(have < wanted for have, wanted in zip(kept.shape[2:], coords)):
            drawn = self._draw(place, rows, key, like, rate, coords, kept)
            if drawn is None:
                return _factors(rows, rows.samples, key, like, rate, coords, shared)
            kept = drawn
        for dim, size in enumerate(coords):
            if kept.shape[dim + 2] != size:
                kept = kept.narrow(dim + 2, 0, size)
        return kept[rows.samples.start : rows.samples.stop]

    def _draw(
        self,
        place: tuple[object, ...],
        rows: Rows,
        key: int,
        like: Tensor,
        rate: float,
        coords: Sequence[int],
        before: Tensor | None,
    ) -> Tensor | None:
        """The factors of all K samples, kept from now on; None if they do not fit."""
        sizes = list(coords)
        if before is not None:
            sizes = [max(pair) for pair in zip(before.shape[2:], coords)]
        samples = range(rows.plan.num_samples)
        added = len(samples) * math.prod(sizes) * like.element_size()
        freed = 0 if before is None else before.numel() * before.element_size()
        if self.bytes + added - freed > self.budget:
            return None
        drawn = _factors(rows, samples, key, like, rate, sizes, shared=bool(place[-1]))
        self._kept[place] = drawn
        self.bytes += added - freed
        return drawn


def _factors(
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
