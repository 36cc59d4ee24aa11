"""Where the rows of a pass lie in the tensor that a mask belongs to.

A controlled pass runs M multipliers × S samples × B examples as the rows of one batch, in that
order. A dropout site sees them somewhere in its tensor: as a dimension of its own, or flattened
with others ([rows · windows, ...] in Swin, [time · rows, ...] in time-major models). `Layout` says
where; a dry run finds it once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from afterdrop.errors import SiteError


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
