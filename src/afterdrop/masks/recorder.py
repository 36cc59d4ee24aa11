"""The operator mode of dry runs: nothing is dropped, and every random operation is recorded."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from afterdrop.masks.layout import Layout
from afterdrop.masks.mask_source import Call, Place
from afterdrop.masks.operator_mode import OperatorMode
from afterdrop.masks.row_masks import RowMask


class Visit(NamedTuple):
    """One execution of a random operation in a dry run.

    Attributes:
        place: The operation.
        op: The operator's name.
        rate: Its rate, or None if the operator does not show it.
        shape: The mask's shape.
        value: The tensor that would be dropped.
        own: Whether the model draws the mask itself.
    """

    place: Place
    op: str
    rate: float | None
    shape: tuple[int, ...]
    value: Tensor | None
    own: bool


class Recorder(OperatorMode):
    """Records the random operations of a pass that drops nothing.

    Attributes:
        visits: What was recorded.
        constant: The value of all uniforms. Close to 1, they drop nothing.
        probe: A place, the layout that its mask may have and the number of rows: in passes with
            twice these rows, that mask drops the first half of them.
    """

    def __init__(
        self,
        model: nn.Module,
        held: frozenset[str] = frozenset(),
        rates: Sequence[str] = (),
        places: Collection[Place] = (),
    ) -> None:
        super().__init__(model, held, rates, places)
        self.visits: list[Visit] = []
        self.constant = 0.999
        self.probe: tuple[Place, Layout, int] | None = None

    def mask(
        self, op: str, rate: float, like: Tensor, value: Tensor, call: Call | None = None
    ) -> RowMask | None:
        """See `MaskSource.mask`."""
        place, _ = call or self.locate()
        self.visits.append(Visit(place, op, rate, tuple(like.shape), value, own=False))
        if self.probe is None or self.probe[0] != place:
            return None
        return RowMask(self._fill_probed(torch.ones_like(like), 0.0), 0.0, None, ())

    def uniforms(self, op: str, rate: float | None, like: Tensor) -> Tensor:
        """See `MaskSource.uniforms`."""
        place, _ = self.locate()
        self.visits.append(Visit(place, op, rate, tuple(like.shape), None, own=True))
        u = torch.full_like(like, self.constant, dtype=torch.float32)
        if self.probe is None or self.probe[0] != place:
            return u
        return self._fill_probed(u, 1 - self.constant)

    def _fill_probed(self, x: Tensor, value: float) -> Tensor:
        """`x` with `value` in the first half of the rows, as the probed layout places them."""
        assert self.probe is not None
        _, layout, rows = self.probe
        assert layout.dim is not None
        outer = layout.order == "outer"
        x = x.contiguous()
        x.unflatten(layout.dim, (-1, 2, rows) if outer else (2, -1)).select(
            layout.dim + outer, 0
        ).fill_(value)
        return x
