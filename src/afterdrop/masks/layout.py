"""Where the rows of a pass lie in the tensor that a mask belongs to.

A controlled pass runs M multipliers × S samples × B examples as the rows of one batch, in that
order. In the tensor of a dropout site, the rows are a dimension of their own or are flattened with
another one ([rows · windows, ...] in Swin, [time · rows, ...] in time-major models). `Layout` says
where they are; dry runs find it once.

Legend: M multipliers, S samples, B examples.
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
        dim: The dimension that holds the rows, or None if all rows share the mask.
        order: Whether a dimension that is flattened with the rows varies faster than they do
            ("inner": [rows · n, ...]) or slower ("outer": [n · rows, ...]).
        varies: If rows share the mask: whether its shape depends on the batch nevertheless (packed
            sequences).
        stream: Whether examples of a stream (windows of a text) share the mask.
        scaled: Whether the rate comes from a declared attribute, which is already scaled.
    """

    dim: int | None
    order: Literal["inner", "outer"] = "inner"
    varies: bool = False
    stream: bool = False
    scaled: bool = False


def coordinates(shape: list[int], layout: Layout, rows: int) -> tuple[list[int], int, list[int]]:
    """The shape of an example's mask, where the rows are inserted into it, and what they contain.

    Args:
        shape: The shape of the mask of all rows.
        layout: Where the rows lie in it; `dim` is not None.
        rows: The number of rows.

    Returns:
        The sizes inside an example; the position of the rows between them; the size that is
        flattened with the rows, as a list of at most one number.
    """
    assert layout.dim is not None
    per_row, rest = divmod(shape[layout.dim], rows)
    if rest:
        raise SiteError(
            f"a mask of shape {tuple(shape)} does not divide into {rows} rows along dimension "
            f"{layout.dim} as it did in the dry run; make its shape depend on the batch size only"
        )
    flattened = [per_row] if per_row > 1 else []
    at = layout.dim + (layout.order == "outer" and per_row > 1)
    return shape[: layout.dim] + flattened + shape[layout.dim + 1 :], at, flattened


def probe_layout(
    before: tuple[Sequence[int], Tensor | None],
    after: tuple[Sequence[int], Tensor | None],
    rows: int,
) -> list[Layout]:
    """Layouts that a mask may have, from a pass with `rows` rows and one with these rows twice.

    Both passes drop nothing, so equal rows hold equal values. This distinguishes [rows · n, ...]
    from [n · rows, ...]. Without values (for masks that the model draws itself), both remain.

    Args:
        before: The shape of the mask with `rows` rows, and the values to be dropped.
        after: The same with 2 · rows rows.
        rows: The number of rows in `before`.

    Example:
        >>> probe_layout(((3, 5), None), ((6, 5), None), rows=3)
        [Layout(dim=0, order='inner', varies=False, stream=False, scaled=False)]
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
