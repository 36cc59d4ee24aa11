"""Dry runs: passes on the user's own input that drop nothing.

    Recorder       answers every operator with a mask that keeps everything, and records the visit
    DryRun         the passes of one model on one input; whatever they change is undone
    find_layouts   the same rows twice, and one alone: where the rows lie in each mask, and whether
                   samples can be batched with the examples

What they find out, and what is refused: `discovery`.
"""

import contextlib
import dataclasses
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from afterdrop.errors import AfterdropError, SiteError
from afterdrop.masks.control import OperatorMode
from afterdrop.masks.model_call import (
    LogitsPlace,
    batch_size,
    close,
    output_tensor,
    take_rows,
    without_fast_path,
)
from afterdrop.masks.model_guard import ModelState
from afterdrop.masks.operators import Call, Place
from afterdrop.masks.rows import Layout, RowMask, probe_layout


class Visit(NamedTuple):
    """One execution of a random operation in a dry run.

    Attributes:
        place: The operation.
        op: The operator's name.
        rate: Its rate, or None if the operator does not show it.
        shape: The mask's shape.
        value: The tensor that would be dropped, if it was to be kept (`Recorder.kept`).
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
        kept: Places whose tensors are recorded. All of them would take several times the memory
            of a pass, which is measured here.
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
        self.kept: Collection[Place] = ()
        self.probe: tuple[Place, Layout, int] | None = None

    def mask(
        self, op: str, rate: float, like: Tensor, value: Tensor, call: Call | None = None
    ) -> RowMask | None:
        """See `MaskSource.mask`."""
        place, _ = call or self.locate()
        kept = value if place in self.kept else None
        self.visits.append(Visit(place, op, rate, tuple(like.shape), kept, own=False))
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


class DryRun:
    """The dry runs of one model on one input.

    Args:
        model: The module.
        inputs: Positional inputs.
        kwargs: Keyword inputs.
        rates: Declared attributes that hold rates.
        batch_dim: The batch dimension of the inputs.
        logits: Where the output holds its logits (see `output_tensor`).

    Attributes:
        batch: The number of examples in the input.
        dtype: The coarsest that the model computes with, once a pass was watched.
    """

    dtype: torch.dtype | None = None

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        kwargs: Any,
        rates: tuple[str, ...],
        batch_dim: int,
        logits: LogitsPlace | None = None,
    ) -> None:
        self.model, self.rates, self.batch_dim, self.logits = model, rates, batch_dim, logits
        self.inputs, self.kwargs = inputs, kwargs
        self.batch = batch_size((inputs, kwargs), batch_dim)
        if self.batch == 0:
            raise SiteError("the input has no examples; pass at least one")
        if self.batch == 1:
            self._try_two_rows()

    def _try_two_rows(self) -> None:
        """Doubles a single row, which cannot show where rows lie, if the model takes two."""
        inputs, kwargs = self.take(copies=2)
        try:
            with torch.no_grad(), self.undone(), without_fast_path():
                self.model(*inputs, **kwargs)
        except Exception:  # the user's model may fail in any way: stay with one row
            return
        self.inputs, self.kwargs, self.batch = inputs, kwargs, 2

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Restores the model's state and all global random generators on exit."""
        state = ModelState(self.model, by_value=True)
        devices = sorted({b.device.index or 0 for b in self.model.parameters() if b.is_cuda})
        python, numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(numpy)
                state.restore()

    def same(self, output: Tensor, expected: Tensor) -> bool:
        """Whether two outputs are the same up to the rounding of this model."""
        return close(output, expected, self.dtype)

    def recorder(self, held: set[str], visits: list[Visit]) -> Recorder:
        """A recorder that also forces on the dropout of `visits` in held modules."""
        places = {visit.place for visit in visits}
        return Recorder(self.model, frozenset(held), self.rates, places)

    def take(self, copies: int = 1, rows: int | None = None) -> Any:
        """Copies of the inputs: positional and keyword arguments.

        Args:
            copies: How often the rows are repeated.
            rows: How many rows to take, the first ones; all by default.
        """
        stop = self.batch if rows is None else rows
        arguments = (self.inputs, self.kwargs)
        return take_rows(arguments, self.batch_dim, self.batch, 0, stop, copies)

    def run(
        self, recorder: Recorder, multiplier: float = 1.0, copies: int = 1, rows: int | None = None
    ) -> Tensor:
        """The logits of one recorded pass.

        Args:
            recorder: Records this pass only; earlier visits are forgotten.
            multiplier: Of the declared rates.
            copies: See `take`.
            rows: See `take`.
        """
        inputs, kwargs = self.take(copies, rows)
        recorder.visits.clear()
        with recorder.prepared(multiplier):
            return output_tensor(recorder.run(*inputs, **kwargs), self.logits)


_HALF = 0.5


def find_layouts(
    dry: DryRun, held: set[str], visits: list[Visit]
) -> tuple[dict[Place, Layout], bool, str]:
    """Where the rows lie at each place, whether samples can be rows, and if not, why.

    Args:
        dry: Runs the model.
        held: Names of modules that stay in eval mode.
        visits: The random operations of a pass with the rows of the input.
    """
    recorder = dry.recorder(held, visits)
    unbatched = {v.place: Layout(None, varies=True) for v in visits}
    try:
        output = dry.run(recorder, _HALF, copies=2)
    except AfterdropError:
        raise
    except Exception as error:  # the user's model may fail in any way at another batch size
        return unbatched, False, f"the model fails on twice the rows: {type(error).__name__}"
    pairs = _pairs(dry, recorder, visits, list(recorder.visits))
    if pairs is None:
        return unbatched, False, "the number of random operations depends on the batch size"
    layouts: dict[Place, Layout] = {}
    for unscaled, (old, new) in zip(visits, pairs):
        found = _fitting(old, new, dry.batch)
        layout = found[0] if len(found) == 1 else _probe(dry, recorder, new, found, output)
        scaled = bool(dry.rates) and not old.own and new.rate != unscaled.rate
        layout = dataclasses.replace(layout, scaled=scaled)
        if layouts.setdefault(old.place, layout) != layout:
            layouts[old.place] = Layout(None, varies=True, scaled=scaled)
    return layouts, *_independent(dry, recorder, layouts, output)


def _pairs(
    dry: DryRun, recorder: Recorder, once: list[Visit], twice: list[Visit]
) -> list[tuple[Visit, Visit]] | None:
    """Each visit of a pass, and of one with twice the rows; None if there are not as many.

    Where shapes leave several layouts, the visits are those of passes that keep the tensors.
    """
    if len(once) != len(twice):
        return None
    pairs = list(zip(once, twice))
    recorder.kept = {old.place for old, new in pairs if len(_fitting(old, new, dry.batch)) > 1}
    if not recorder.kept:
        return pairs
    again = []
    for copies in (1, 2):
        dry.run(recorder, _HALF, copies)
        again.append(list(recorder.visits))
    recorder.kept = ()
    once, twice = again
    return list(zip(once, twice)) if len(once) == len(twice) == len(pairs) else None


def _fitting(old: Visit, new: Visit, rows: int) -> list[Layout]:
    """The layouts that the mask may have, as far as the visits show."""
    return probe_layout((old.shape, _values(old)), (new.shape, _values(new)), rows)


def _values(visit: Visit) -> Tensor | None:
    """The values to be dropped, if they have the mask's dimensions."""
    value = visit.value
    return value if value is not None and value.dim() == len(visit.shape) else None


def _probe(
    dry: DryRun, recorder: Recorder, visit: Visit, found: list[Layout], expected: Tensor
) -> Layout:
    """The layout with which dropping half of the rows changes no other rows."""
    fitting = []
    for layout in found:
        recorder.probe = visit.place, layout, dry.batch
        output = dry.run(recorder, _HALF, copies=2)
        recorder.probe = None
        if output.dim() > dry.batch_dim and output.shape[dry.batch_dim] == 2 * dry.batch:
            others = [x.narrow(dry.batch_dim, dry.batch, dry.batch) for x in (output, expected)]
            if dry.same(*others):
                fitting.append(layout)
    return fitting[0] if len(fitting) == 1 else Layout(None, varies=True)


def _independent(
    dry: DryRun, recorder: Recorder, layouts: dict[Place, Layout], output: Tensor
) -> tuple[bool, str]:
    """Whether each row has its own mask and does not influence other rows, and if not, why."""
    shared = [str(place) for place, layout in layouts.items() if layout.dim is None]
    if shared:
        return False, f"rows share the mask of {', '.join(shared)}"
    if output.dim() <= dry.batch_dim or output.shape[dry.batch_dim] != 2 * dry.batch:
        return False, "the output has another batch dimension than the input"
    try:
        single = dry.run(recorder, _HALF, rows=1)
    except Exception as error:  # the user's model may fail in any way on a single row
        return False, f"the model fails on a single row: {type(error).__name__}"
    first = output.narrow(dry.batch_dim, 0, 1)
    again = output.narrow(dry.batch_dim, dry.batch, 1)
    if not (dry.same(single, first) and dry.same(again, first)):
        return False, "the rows of a batch influence each other"
    return True, ""
