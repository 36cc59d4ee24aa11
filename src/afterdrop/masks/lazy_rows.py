"""Copies of the rows of a tensor that are made when something reads them.

A pass under masks has a row for every sample and multiplier. Before the first dropout site these
rows are copies of the examples. Modules whose output is known already do not read their input, so
most of these copies are never made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from afterdrop.masks.model_call import map_tensors, plain
from afterdrop.masks.rows import Layout


class LazyRows(Tensor):
    """A tensor of a known shape without memory; what reads it makes it first.

    Code that reads a tensor's memory outside of torch's operators gets an error.

    Args:
        like: Gives dtype and device.
        shape: The shape.
        make: Makes the tensor; called once at most.

    Example:
        >>> x = LazyRows(torch.zeros(2), (4,), lambda: torch.arange(2.0).repeat(2))
        >>> x.shape, x.was_made, x + 1, x.was_made
        (torch.Size([4]), False, tensor([1., 2., 1., 2.]), True)
    """

    _make: Callable[[], Tensor]
    _made: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, like: Tensor, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Self:
        """See the class."""
        lazy: Self = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        lazy._make, lazy._made = make, None
        return lazy

    @property
    def was_made(self) -> bool:
        """Whether something read the tensor."""
        return self._made is not None

    def made(self) -> Tensor:
        """The tensor itself."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and whether it was made, without making it."""
        return f"LazyRows({tuple(self.shape)}, was_made={self.was_made})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator on the tensors that were lazy."""
        args, kwargs = pytree.tree_map_only(cls, cls.made, (args, kwargs or {}))
        return func(*args, **kwargs)


def copied_shape(
    x: Tensor, layout: Layout, rows: int, part: Sequence[int], copies: int
) -> tuple[int, ...]:
    """The shape of `copied_rows`."""
    shape = list(x.shape)
    if layout.dim is not None:
        shape[layout.dim] = shape[layout.dim] // rows * len(part) * copies
    return tuple(shape)


def copied_rows(x: Tensor, layout: Layout, rows: int, part: Sequence[int], copies: int) -> Tensor:
    """Copies of some rows of a tensor, one copy of all of them after the other.

    Args:
        x: A tensor of `rows` rows.
        layout: Where they lie in it; all rows share a tensor without a row dimension.
        rows: Their number.
        part: The numbers of the rows to copy, a range or a list.
        copies: How often.

    Example:
        >>> copied_rows(torch.tensor([1, 2, 3]), Layout(0), 3, range(1, 3), copies=2)
        tensor([2, 3, 2, 3])
        >>> copied_rows(torch.tensor([1, 2, 3, 4]), Layout(0, "outer"), 2, range(1), copies=2)
        tensor([1, 1, 3, 3])
    """
    if layout.dim is None:
        return x.clone()
    at = layout.dim + (layout.order == "outer")
    sizes = (-1, rows) if layout.order == "outer" else (rows, -1)
    taken = x.unflatten(layout.dim, sizes)
    if isinstance(part, range):
        taken = taken.narrow(at, part.start, len(part))
    else:
        taken = taken.index_select(at, torch.tensor(part).to(x.device))
    times = [1] * taken.dim()
    times[at] = copies
    taken = taken.repeat(times) if copies > 1 else taken.clone()
    return taken.flatten(layout.dim, layout.dim + 1)


def lazy_inputs(inputs: Any, batch_dim: int, batch: int, part: Sequence[int], copies: int) -> Any:
    """What `take_rows` gives, with copies that are made when they are read.

    Args:
        inputs: Nested inputs.
        batch_dim: Their batch dimension.
        batch: The batch size.
        part: The numbers of the examples to copy, a range or a list.
        copies: How often.
    """
    layout = Layout(batch_dim)

    def lazy(tensor: Tensor) -> Tensor:
        if tensor.dim() <= batch_dim or tensor.shape[batch_dim] != batch:
            return tensor
        where = plain(tensor), layout, batch, part, copies
        return LazyRows(tensor, copied_shape(*where), partial(copied_rows, *where))

    return map_tensors(inputs, lazy)
