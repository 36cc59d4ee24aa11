"""Control of every dropout site of a module: forward passes with masks that are given.

Legend: M multipliers, S samples, B examples.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from afterdrop.errors import SiteError
from afterdrop.masks.layout import Layout
from afterdrop.masks.mask_source import Call, Place
from afterdrop.masks.operator_mode import OperatorMode
from afterdrop.masks.rates import UNSCALED
from afterdrop.masks.row_masks import RowMask, draw_row_mask, row_uniforms
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import site_key


class Control(OperatorMode):
    """Runs forward passes of a model under the masks of M × S × B rows.

    Args:
        model: The module.
        held: Names of modules that stay in eval mode.
        rates: Declared attributes that hold the rates of masks which the model draws itself.
        layouts: Where the rows lie at each place, from a dry run.

    Attributes:
        draw: Draws the masks: `draw_row_mask`, or a faster function with the same results.
    """

    def __init__(
        self,
        model: nn.Module,
        held: frozenset[str],
        rates: Sequence[str],
        layouts: dict[Place, Layout],
    ) -> None:
        super().__init__(model, held, rates, places=layouts)
        self.layouts = layouts
        self.draw: Callable[..., RowMask] = draw_row_mask
        self._rows: Rows | None = None

    def forward(self, rows: Rows, *args: Any, **kwargs: Any) -> Any:
        """One forward pass of the model with the masks of `rows`."""
        self._rows = rows
        return self.run(*args, **kwargs)

    def mask(
        self, op: str, rate: float, like: Tensor, value: Tensor, call: Call | None = None
    ) -> RowMask:
        """See `MaskSource.mask`."""
        call = call or self.locate()
        rows, layout = self._running(), self._layout(call.place, op)
        multipliers = UNSCALED if layout.scaled else rows.multipliers
        rates = multipliers.rates(str(call.place), rate)
        if max(rates) >= 1:
            raise SiteError(
                f"{op} in module {call.place} has rate {rate:g}: multiplier "
                f"{multipliers.largest:g} x {rate:g} drops everything; use multipliers for which "
                "multiplier x rate < 1"
            )
        return self.draw(rows, _key(rows, call), layout, like, rates)

    def uniforms(self, op: str, rate: float | None, like: Tensor) -> Tensor:
        """See `MaskSource.uniforms`. The model compares them to its declared rate."""
        call = self.locate()
        rows, layout = self._running(), self._layout(call.place, op)
        return row_uniforms(rows, _key(rows, call), layout, like)

    def _running(self) -> Rows:
        assert self._rows is not None
        return self._rows

    def _layout(self, place: Place, op: str) -> Layout:
        if place in self.layouts:
            return self.layouts[place]
        # A loop may run longer than in the dry run; its operations all have the same layout.
        others = {layout for p, layout in self.layouts.items() if p.module == place.module}
        if len(others) == 1:
            return others.pop()
        raise SiteError(
            f"{op} in module {place} did not run in the dry run: the model takes another path on "
            "this input; evaluate with a first batch that takes every path"
        )


def _key(rows: Rows, call: Call) -> int:
    return site_key(rows.plan.seed, *call.place, call.number)
