"""The rows of a forward pass, where they lie in a tensor, and a mask for each.

A controlled pass runs M multipliers × S samples × B examples as the rows of one batch, in that
order. A dropout site sees them somewhere in its tensor: as a dimension of its own, or flattened
with others ([rows · windows, ...] in Swin, [time · rows, ...] in time-major models). `Layout` says
where; a dry run finds it once.

Legend: M multipliers, S samples of a chunk, B examples.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from afterdrop.errors import SiteError
from afterdrop.masks.rates import Multipliers
from afterdrop.masks.uniforms import Plan, uniforms


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
            f"{layout.dim} as it did in the dry run; make its shape depend on the batch size only, "
            "or, if examples have several rows of the input, as graphs have nodes, evaluate with a "
            "first batch in which they do"
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


@dataclasses.dataclass(frozen=True, init=False)
class Rows:
    """The rows of one forward pass: multipliers × samples × examples, examples innermost.

    Attributes:
        plan: How samples are drawn.
        multipliers: The M multipliers; the constructor also accepts plain numbers.
        samples: Indices of the S samples.
        examples: [B] numbers of the examples, which key their masks.
        streams: [B] numbers that key masks which outlive an example (`Layout.stream`).
    """

    plan: Plan
    multipliers: Multipliers
    samples: range
    examples: Tensor
    streams: Tensor | None

    def __init__(
        self,
        plan: Plan,
        multipliers: Multipliers | Sequence[float],
        samples: range,
        examples: Tensor,
        streams: Tensor | None = None,
    ) -> None:
        values = plan, Multipliers.of(multipliers), samples, examples, streams
        for field, value in zip(dataclasses.fields(self), values):
            object.__setattr__(self, field.name, value)

    def keys(self, layout: Layout) -> Tensor:
        """The numbers that key the masks of a place."""
        return self.streams if layout.stream and self.streams is not None else self.examples

    def __len__(self) -> int:
        return len(self.multipliers) * len(self.samples) * len(self.examples)


@dataclasses.dataclass(frozen=True)
class RowMask:
    """A mask whose rows are unfolded to [M, S, B], and the rate at which each multiplier drops.

    `unfold` brings the site's tensor into the same form, so that factors per multiplier broadcast.

    Attributes:
        mask: 1 where a unit is kept, 0 where it is dropped.
        rate: The rate of dropping, or one per multiplier in a shape that broadcasts with `mask`.
        dim: The dimension of the site's tensor that holds the rows, or None if none does.
        sizes: What that dimension unfolds to.
    """

    mask: Tensor
    rate: Tensor | float
    dim: int | None
    sizes: tuple[int, ...]

    def unfold(self, x: Tensor) -> Tensor:
        """The tensor with its row dimension unfolded like the mask."""
        return x if self.dim is None else x.unflatten(self.dim, self.sizes)

    def drop(self, x: Tensor) -> Tensor:
        """Plain dropout: x / (1 − rate) where kept, 0 elsewhere. Overwrites the mask."""
        scaled = self.mask.div_(1.0 - self.rate)
        if scaled.numel() == x.numel():
            return scaled.mul_(self.unfold(x)).reshape(x.shape)
        return (self.unfold(x) * scaled).reshape(x.shape)

    def attention(self, scores: Tensor, causal: bool) -> Tensor:
        """Attention weights after dropout. May overwrite the scores and the mask."""
        return self.drop(attention_weights(scores, causal))


def attention_weights(scores: Tensor, causal: bool) -> Tensor:
    """The softmax of scores [..., queries, keys].

    Args:
        scores: Overwritten if `causal`.
        causal: Whether a query sees no later keys.

    Example:
        >>> attention_weights(torch.zeros(2, 2), causal=True)
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
    """
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(ahead, float("-inf"))
    return scores.softmax(-1)


def draw_row_mask(
    rows: Rows,
    key: int,
    layout: Layout,
    like: Tensor,
    rates: tuple[float, ...],
    draw: Callable[..., Tensor] = uniforms,
) -> RowMask:
    """Draws the mask of a dropout site for every row.

    Args:
        rows: The rows of this pass.
        key: The key of the site and call.
        layout: Where the rows lie in `like`.
        like: A tensor of the mask's shape, dtype and device. Its values are not read.
        rates: The rates at which the site drops, one per multiplier of `rows`.
        draw: `uniforms`, or a faster function with the same results.
    """
    if layout.dim is None:
        u = _shared_uniforms(rows, key, layout, like, draw)
        return RowMask(_at_least(u, rates[0], like.dtype), rates[0], None, ())
    u, at, flattened = _unfolded_uniforms(rows, key, layout, like, draw)
    u = u.unsqueeze(at)
    unfolded = [len(rates), len(rows.samples), len(rows.examples)]
    threshold: Tensor | float = rates[0]
    if len(rates) > 1:
        column = [len(rates)] + [1] * (u.dim() - at - 1)
        threshold = torch.tensor(rates, dtype=torch.float32).to(like.device).view(column)
    sizes = tuple(flattened + unfolded if at > layout.dim else unfolded + flattened)
    return RowMask(_at_least(u, threshold, like.dtype), threshold, layout.dim, sizes)


def row_uniforms(rows: Rows, key: int, layout: Layout, like: Tensor) -> Tensor:
    """Uniforms in the shape of `like`, different for each row; for a single multiplier."""
    if layout.dim is None:
        return _shared_uniforms(rows, key, layout, like, uniforms)
    return _unfolded_uniforms(rows, key, layout, like, uniforms)[0].reshape(like.shape)


def _shared_uniforms(
    rows: Rows, key: int, layout: Layout, like: Tensor, draw: Callable[..., Tensor]
) -> Tensor:
    examples = rows.examples[:1] if layout.varies else None
    return draw(rows.plan, key, rows.samples, examples, like.shape, like.device)[0, 0]


def _unfolded_uniforms(
    rows: Rows, key: int, layout: Layout, like: Tensor, draw: Callable[..., Tensor]
) -> tuple[Tensor, int, list[int]]:
    """Uniforms with [S, B] in place of the rows, that dimension, and what is flattened with it."""
    coords, at, flattened = coordinates(list(like.shape), layout, len(rows))
    u = draw(rows.plan, key, rows.samples, rows.keys(layout), coords, like.device)
    return u.movedim((0, 1), (at, at + 1)), at, flattened


def _at_least(u: Tensor, threshold: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`u >= threshold` as 0 and 1 in `dtype`, without a bool tensor in between."""
    shape = u.shape
    if isinstance(threshold, Tensor):
        shape = torch.broadcast_shapes(u.shape, threshold.shape)
    return torch.ge(u, threshold, out=torch.empty(shape, dtype=dtype, device=u.device))
