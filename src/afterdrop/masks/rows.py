"""Rows of a forward pass, and where they lie in the tensor that a mask belongs to.

A controlled pass runs L multipliers × S samples × B examples as the rows of one batch, in that
order. A dropout site sees them somewhere in its tensor: as a dimension of its own, or flattened
with others ([rows · windows, ...] in Swin, [time · rows, ...] in time-major models). `Layout` says
where, found once by a dry run; `keep_mask` then gives every row its own mask.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from afterdrop.errors import DataError, SiteError
from afterdrop.masks.keep import Keep
from afterdrop.masks.uniforms import Plan, uniforms


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one forward pass: multipliers × samples × examples, examples innermost.

    Attributes:
        plan: How samples are drawn.
        multipliers: L factors on every rate.
        samples: Which S samples.
        examples: [B] numbers of the examples, which key their masks.
        streams: [B] numbers that key masks which outlive an example (`Layout.stream`).
    """

    plan: Plan
    multipliers: tuple[float, ...]
    samples: range
    examples: Tensor
    streams: Tensor | None = None

    def keys(self, layout: "Layout") -> Tensor:
        """The numbers that key the masks of a place."""
        return self.streams if layout.stream and self.streams is not None else self.examples

    def __len__(self) -> int:
        return len(self.multipliers) * len(self.samples) * len(self.examples)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the rows lie in the tensor of a mask.

    Args:
        dim: The dimension that holds the rows, or None if the mask has none.
        order: Whether what is flattened with the rows varies inside a row ("inner") or outside.
        varies: Without rows: whether the mask's shape still follows the batch (packed sequences).
        stream: Whether the mask belongs to a stream of examples (windows of a text), not to each.
        scaled: Whether the rate comes from a declared attribute, which is scaled already.
    """

    dim: int | None
    order: Literal["inner", "outer"] = "inner"
    varies: bool = False
    stream: bool = False
    scaled: bool = False


def keep_mask(rows: Rows, key: int, layout: Layout, like: Tensor, rate: float) -> Keep:
    """1 where a unit is kept, 0 where it is dropped, for every row.

    Args:
        rows: The rows of this pass.
        key: The key of site and call.
        layout: Where the rows lie in `like`.
        like: A tensor of the mask's shape, dtype and device (only these are used).
        rate: The site's own rate; multiplied here by each row's multiplier.
    """
    rates = [multiplier * rate for multiplier in rows.multipliers]
    if layout.dim is None:
        u = _shared_uniforms(rows, key, layout, like)
        return Keep(_at_least(u, rates[0], like.dtype), rates[0], None, ())
    u, at, flattened = _row_uniforms(rows, key, layout, like)
    u = u.unsqueeze(at)
    # A rate that is scaled already is one for all rows, which then have one multiplier.
    three = [len(rows.multipliers), len(rows.samples), len(rows.examples)]
    threshold: Tensor | float = rates[0]
    if len(rates) > 1:
        column = [len(rates)] + [1] * (u.dim() - at - 1)
        threshold = torch.tensor(rates, dtype=torch.float32, device=like.device).view(column)
    sizes = tuple(flattened + three if at > layout.dim else three + flattened)
    return Keep(_at_least(u, threshold, like.dtype), threshold, layout.dim, sizes)


def row_uniforms(rows: Rows, key: int, layout: Layout, like: Tensor) -> Tensor:
    """Uniforms of `like`'s own shape, each row its own; one multiplier only."""
    if layout.dim is None:
        return _shared_uniforms(rows, key, layout, like)
    return _row_uniforms(rows, key, layout, like)[0].reshape(like.shape)


def _shared_uniforms(rows: Rows, key: int, layout: Layout, like: Tensor) -> Tensor:
    examples = rows.examples[:1] if layout.varies else None
    return uniforms(rows.plan, key, rows.samples, examples, like.shape, like.device)[0, 0]


def _row_uniforms(
    rows: Rows, key: int, layout: Layout, like: Tensor
) -> tuple[Tensor, int, list[int]]:
    """Uniforms with S and B where the rows lie, that dimension, and what is flattened with them."""
    coords, at, flattened = coordinates(list(like.shape), layout, len(rows))
    u = uniforms(rows.plan, key, rows.samples, rows.keys(layout), coords, like.device)
    return u.movedim((0, 1), (at, at + 1)), at, flattened


def coordinates(shape: list[int], layout: Layout, rows: int) -> tuple[list[int], int, list[int]]:
    """Sizes inside an example, where the rows come between them, and what is flattened there."""
    assert layout.dim is not None
    per_row, rest = divmod(shape[layout.dim], rows)
    if rest:
        raise SiteError(
            f"a mask of shape {tuple(shape)} does not divide into {rows} rows along dimension "
            f"{layout.dim} as it did in the dry run; its shape depends on more than the batch"
        )
    flattened = [per_row] if per_row > 1 else []
    at = layout.dim + (layout.order == "outer" and per_row > 1)
    return shape[: layout.dim] + flattened + shape[layout.dim + 1 :], at, flattened


def _at_least(u: Tensor, threshold: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`u >= threshold` as 0 and 1 in `dtype`, written by the comparison itself (no bool pass)."""
    if not isinstance(threshold, Tensor):
        return torch.ge(u, threshold, out=torch.empty(u.shape, dtype=dtype, device=u.device))
    shape = torch.broadcast_shapes(u.shape, threshold.shape)
    return torch.ge(u, threshold, out=torch.empty(shape, dtype=dtype, device=u.device))


def batch_size(inputs: Any, batch_dim: int) -> int:
    """The size of the batch dimension of the first tensor in nested inputs."""
    for tensor in tensors(inputs):
        if tensor.dim() > batch_dim:
            return tensor.shape[batch_dim]
    raise DataError(
        f"no input tensor has a dimension {batch_dim}; give tensors (or tuples or dicts of them) "
        "whose batch dimension is batch_dim"
    )


def tensors(inputs: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and mappings, in order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, Mapping):
        return [tensor for value in inputs.values() for tensor in tensors(value)]
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return [tensor for value in inputs for tensor in tensors(value)]
    return []


def take_rows(inputs: Any, batch_dim: int, batch: int, start: int, stop: int, copies: int) -> Any:
    """Copies of the examples start:stop of nested inputs, `copies` times after each other.

    A tensor follows the batch if its `batch_dim` has size `batch`; everything else is passed on.
    """
    if isinstance(inputs, Tensor):
        if inputs.dim() <= batch_dim or inputs.shape[batch_dim] != batch:
            return inputs
        part = inputs.narrow(batch_dim, start, stop - start)
        if copies == 1:
            return part.clone()  # the model may write into its input
        times = [1] * part.dim()
        times[batch_dim] = copies
        return part.repeat(times)
    if isinstance(inputs, Mapping):
        return {k: take_rows(v, batch_dim, batch, start, stop, copies) for k, v in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(take_rows(v, batch_dim, batch, start, stop, copies) for v in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(take_rows(v, batch_dim, batch, start, stop, copies) for v in inputs)
    return inputs


def probe_layout(
    before: tuple[Sequence[int], Tensor | None],
    after: tuple[Sequence[int], Tensor | None],
    rows: int,
) -> list[Layout]:
    """Layouts that a mask may have, from passes with `rows` rows and with these twice.

    Both passes drop nothing, so equal rows hold equal values: that tells [rows · n, ...] from
    [n · rows, ...]. Where values do not tell (masks that the model draws itself), both remain.

    Args:
        before: Shape of the mask with `rows` rows, and the values that it belongs to.
        after: The same with 2 · rows rows.
        rows: Number of rows in `before`.
    """
    old, new = list(before[0]), list(after[0])
    if old == new:
        return [Layout(None)]
    doubled = [d for d, (a, b) in enumerate(zip(old, new)) if a != b]
    if len(old) != len(new) or len(doubled) != 1 or new[doubled[0]] != 2 * old[doubled[0]]:
        return [Layout(None, varies=True)]
    dim = doubled[0]
    per_row, rest = divmod(old[dim], rows)
    if rest or per_row == 0:
        return [Layout(None, varies=True)]
    inner, outer = Layout(dim), Layout(dim, "outer")
    if per_row == 1:
        return [inner]
    if before[1] is None or after[1] is None:
        return [inner, outer]
    x, y = before[1], after[1]
    found = []
    if _equal(x, y.narrow(dim, 0, old[dim])):
        found.append(inner)
    wide = y.unflatten(dim, (per_row, 2 * rows)).narrow(dim + 1, 0, rows)
    if _equal(x.unflatten(dim, (per_row, rows)), wide):
        found.append(outer)
    return found if len(found) == 1 else [inner, outer]


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=1e-3, atol=1e-5, equal_nan=True)


def split_evenly(total: int, limit: int) -> list[range]:
    """Consecutive ranges over `total` of nearly equal length, none longer than `limit`."""
    parts = max(1, math.ceil(total / max(1, limit)))
    edges = [round(i * total / parts) for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]
