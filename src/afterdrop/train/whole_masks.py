"""Masks of the whole batch, of which each rank applies those of its rows.

Training masks come from torch's global generator, whose next number depends on how many were drawn
before. For several ranks to train with the masks of one process, every rank draws the masks of all
rows from the same generator state and keeps those of its rows. So the generators stay equal from
step to step, and a checkpoint can be continued with any number of ranks.

In every dropout site of the models the rows are the last dimension but one: [B, H] or
[time, B, H]. The row mask of an embedding table [V, 1] does not depend on the batch, and all ranks
draw it.

Legend: B rows of the batch, S samples of each; rows are S·B, all rows of a sample together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.models.mask import Drop, Mask


@dataclass(frozen=True)
class RankRows:
    """The rows of the batch that a rank computes.

    Attributes:
        mine: The rows of this rank among the B rows.
        batch: B, the rows of the whole batch.
        samples: S, the mask samples per row.

    Example:
        >>> rows = RankRows(slice(1, 2), batch=2, samples=2)
        >>> rows.of(torch.arange(4.0).view(4, 1)).flatten()
        tensor([1., 3.])
    """

    mine: slice
    batch: int
    samples: int = 1

    @property
    def whole(self) -> bool:
        """Whether this rank has all rows."""
        return self.mine == slice(0, self.batch)

    @property
    def count(self) -> int:
        """The rows that this rank computes, S for each of its rows of the batch."""
        return self.samples * (self.mine.stop - self.mine.start)

    def of(self, x: Tensor) -> Tensor:
        """This rank's rows of a tensor with all S·B rows in the last dimension but one."""
        parts = x.unflatten(-2, (self.samples, self.batch))[..., self.mine, :]
        return parts.flatten(-3, -2)

    def all_of(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `of`: all rows, from the parts of the ranks in order."""
        cut = [part.unflatten(-2, (self.samples, -1)) for part in parts]
        return torch.cat(cut, -2).flatten(-3, -2)

    def like(self, x: Tensor) -> Tensor:
        """Ones of the shape that x would have with all rows."""
        return x.new_ones(*x.shape[:-2], self.samples * self.batch, x.shape[-1])


@contextmanager
def whole_masks(model: nn.Module, rows: RankRows) -> Iterator[None]:
    """Makes the dropout sites of a model draw masks of all rows and apply those of this rank.

    Args:
        model: A model of `afterdrop.models`.
        rows: The rank's rows.

    Example:
        >>> site, x = nn.Dropout(0.5), torch.ones(4, 8)
        >>> _ = torch.manual_seed(0)
        >>> whole = site(x)
        >>> _ = torch.manual_seed(0)
        >>> with whole_masks(site, RankRows(slice(2, 4), batch=4)):
        ...     bool((site(x[2:4]) == whole[2:4]).all())
        True
    """
    if rows.whole:
        yield
        return
    with ExitStack() as hooks:
        for module in model.modules():
            if not module.training or not _rate(module):
                continue
            site = _DrawnMask(rows) if isinstance(module, Mask) else _AppliedMask(rows)
            for handle in (
                module.register_forward_pre_hook(site.before),
                module.register_forward_hook(site.after),
            ):
                hooks.callback(handle.remove)
        yield


def _rate(module: nn.Module) -> float:
    """The rate of a dropout site whose masks have rows; 0 for any other module."""
    if isinstance(module, Drop | Mask):
        return module.rate
    return module.p if isinstance(module, nn.Dropout) else 0.0


class _AppliedMask:
    """A site that drops units of x; applied to ones for all rows, it returns the mask."""

    def __init__(self, rows: RankRows) -> None:
        self.rows = rows
        self._x: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        self._x = args[0]
        return (self.rows.like(args[0]),)

    def after(self, module: nn.Module, args: Any, mask: Tensor) -> Tensor:
        assert self._x is not None
        x, self._x = self._x, None
        return x * self.rows.of(mask)


class _DrawnMask:
    """A site that draws a mask of the shape of a state; it is given a state with all rows."""

    def __init__(self, rows: RankRows) -> None:
        self.rows = rows

    def before(self, module: nn.Module, args: tuple[int, Tensor]) -> tuple[int, Tensor]:
        return args[0], self.rows.like(args[1])

    def after(self, module: nn.Module, args: Any, mask: Tensor) -> Tensor:
        return self.rows.of(mask)
