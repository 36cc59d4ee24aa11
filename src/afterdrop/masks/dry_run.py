"""Dry runs: passes on the user's own input that drop nothing and verify everything.

    1. discover   train mode under control: which operators ask for masks, which modules draw other
                  random numbers or change their state (those are held in eval mode from here on)
    2. confirm    with those modules held: no site of the first pass may be lost
    3. double     the same rows twice, and one alone: where the rows lie in each mask, and whether
                  rows are independent, so that samples can be batched with the examples
    4. compare    with every rate at 0, the output must be that of model.eval()

What cannot be verified raises a `SiteError` that names the modules and the remedy.
"""

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afterdrop.errors import AfterdropError, SiteError
from afterdrop.masks.control import Control, Place, Visit
from afterdrop.masks.detect import Detector, Draw
from afterdrop.masks.layout import Layout, probe_layout
from afterdrop.masks.mode import eval_mode
from afterdrop.masks.nested_inputs import batch_size, take_rows
from afterdrop.masks.outputs import close, output_tensor

_MASK_KERNELS = ("bernoulli", "bernoulli_", "native_dropout", "_fused_dropout")


class DryRun:
    """The dry runs of one model on one input.

    Args:
        model: The module.
        inputs: Positional inputs.
        kwargs: Keyword inputs.
        rates: Declared attributes that hold rates.
        batch_dim: Batch dimension of the inputs.
    """

    def __init__(
        self, model: nn.Module, inputs: Any, kwargs: Any, rates: tuple[str, ...], batch_dim: int
    ) -> None:
        self.model, self.rates, self.batch_dim = model, rates, batch_dim
        self.inputs, self.kwargs = inputs, kwargs
        self.batch = batch_size((inputs, kwargs), batch_dim)
        if self.batch == 0:
            raise SiteError("the input has no examples; give a few")
        self._undropped: Tensor | None = None  # the output of a pass that drops nothing
        if self.batch == 1:
            self._try_two_rows()

    def _try_two_rows(self) -> None:
        """One row hides what belongs to rows, so it is doubled where the model takes two."""
        inputs, kwargs = self._take(copies=2)
        try:
            with torch.no_grad(), self.undone(), _evaluating(self.model):
                self.model(*inputs, **kwargs)
        except Exception:  # any failure of the user's model: one row it is
            return
        self.inputs, self.kwargs, self.batch = inputs, kwargs, 2

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever the dry runs do to buffers and to global generators is undone."""
        buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        devices = sorted({b.device.index or 0 for b in self.model.parameters() if b.is_cuda})
        python, numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(numpy)
                for module, name, buffer, before in buffers:
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)

    def discover(self, held: set[str]) -> tuple[list[Visit], int, list[tuple[str, str]]]:
        """The random operations, bytes per row, and modules to leave off with the reason."""
        control = Control(self.model, frozenset(held), self.rates)
        detector = Detector(control)
        with detector:
            self._undropped = self._run(control)
        hidden = [draw for draw in detector.draws if draw.op in _MASK_KERNELS]
        if hidden:
            raise SiteError(
                f"masks are drawn out of reach in: {_where(hidden)}. A scripted, compiled or "
                "extension module hides its operators: use the eager module, or noise=('name',) if "
                "its draws are not dropout"
            )
        stray: dict[str, set[str]] = {}
        for draw in detector.draws:
            stray.setdefault(draw.module, set()).add(draw.op)
        off = {name: "draws " + ", ".join(sorted(ops)) for name, ops in stray.items()}
        for name in sorted(detector.changed - set(off)):
            off[name] = "changes its buffers in training"
        return list(control.visits), -(-detector.peak_bytes // self.batch), sorted(off.items())

    def check_declared(self, visits: list[Visit], off: list[tuple[str, str]]) -> None:
        """Refuses masks without declared rates, rates without masks, and no dropout at all."""
        raw = [visit for visit in visits if visit.raw]
        if raw and not self.rates:
            where = ", ".join(sorted({f"{v.place} ({v.op})" for v in raw}))
            raise SiteError(
                f"the model draws masks of its own in: {where}. Say which attributes hold the "
                "rates, as in rates=('dropouti', 'encoder.p'), so that they can be scaled and the "
                "masks controlled; or noise=('module',) if a module's draws are not dropout"
            )
        if self.rates and not raw:
            raise SiteError(
                f"rates={self.rates!r} were declared, but the model drew no mask of its own; "
                "operators such as F.dropout need no declaration: leave rates out"
            )
        if not visits:
            left = "; ".join(f"{name or '(root)'} {what}" for name, what in off)
            raise SiteError(
                "the model has no dropout: no operator dropped anything in a train-mode pass "
                "(rates of 0 do not count). There is nothing to choose from: train it with dropout."
                + f" Left off, because it is not dropout: {left}."
                * bool(off)
            )

    def confirm(self, held: set[str], before: list[Visit]) -> list[Visit]:
        """With noisy modules held nothing else may be random, and no dropout lost."""
        control = self._held_control(held, before)
        detector = Detector(control)
        with detector:
            self._undropped = self._run(control)
        if detector.draws:
            raise SiteError(
                f"random draws remain in eval mode: {_where(detector.draws)}. Evaluation would not "
                "be repeatable: make them deterministic in eval mode"
            )
        if detector.changed:
            raise SiteError(
                f"modules change their buffers even in eval mode: {sorted(detector.changed)}; "
                "make them constant in eval mode"
            )
        lost = {visit.place for visit in before} - {visit.place for visit in control.visits}
        if lost:
            raise SiteError(
                f"dropout in {', '.join(map(str, sorted(lost)))} is gated on self.training of a "
                "module that must stay in eval mode (it also draws noise or keeps statistics); "
                "move the dropout into a module of its own, for example nn.Dropout"
            )
        return list(control.visits)

    def double(self, held: set[str], visits: list[Visit]) -> tuple[dict[Place, Layout], bool, str]:
        """Where the rows lie at each place, whether samples can be rows, and why not."""
        control = self._held_control(held, visits)
        unbatched = {v.place: Layout(None, varies=True) for v in visits}
        try:
            # Half the declared rates: operators whose rate follows are scaled by them already.
            output = self._run(control, multiplier=0.5, copies=2)
        except AfterdropError:
            raise
        except Exception as error:  # any failure of the user's model at another batch size
            return unbatched, False, f"the model fails on twice the rows: {type(error).__name__}"
        after = list(control.visits)
        if len(after) != len(visits):
            return unbatched, False, "the number of random operations depends on the batch size"
        layouts: dict[Place, Layout] = {}
        for old, new in zip(visits, after):
            found = probe_layout((old.shape, _own(old)), (new.shape, _own(new)), self.batch)
            layout = found[0] if len(found) == 1 else self._probe(control, new, found, output)
            scaled = bool(self.rates) and not old.raw and new.rate != old.rate
            layout = dataclasses.replace(layout, scaled=scaled)
            if layouts.setdefault(old.place, layout) != layout:
                layouts[old.place] = Layout(None, varies=True, scaled=scaled)
        return layouts, *self._independent(control, layouts, output)

    def compare(self, held: set[str], layouts: dict[Place, Layout]) -> None:
        """With every rate at 0, the model under control must be model.eval()."""
        expected = self._eval_output()
        control = Control(self.model, frozenset(held), self.rates, places=layouts)
        for output in self._at_rate_zero(control):
            if close(output, expected):
                continue
            if output.shape != expected.shape:
                raise SiteError(
                    "with every dropout rate at 0 the model gives logits of shape "
                    f"{tuple(output.shape)}, model.eval() of {tuple(expected.shape)}: a module "
                    "called DropPath or StochasticDepth changes more than it drops, or something "
                    "else changes in training; rename it, or keep its module in eval mode (noise=)"
                )
            raw = sorted({str(v.place) for v in control.visits if v.raw})
            hint = f" Undeclared masks may be in: {', '.join(raw)}." if raw else ""
            raise SiteError(
                "with every dropout rate at 0 the model does not give what model.eval() gives "
                f"(largest difference {(output - expected).abs().max().item():.3g}).{hint} "
                "Something else changes in training: declare its rate (rates=) or keep its "
                "module in eval mode (noise=)"
            )

    def _at_rate_zero(self, control: Control) -> Iterator[Tensor]:
        """Outputs with every rate at 0; without declared rates, passes before gave one already."""
        if not self.rates:
            assert self._undropped is not None
            yield self._undropped
            return
        for control.constant in (0.999, 0.001):
            yield self._run(control, multiplier=0.0)

    def _take(self, copies: int = 1, rows: int | None = None) -> Any:
        stop = self.batch if rows is None else rows
        arguments = (self.inputs, self.kwargs)
        return take_rows(arguments, self.batch_dim, self.batch, 0, stop, copies)

    def _run(
        self, control: Control, multiplier: float = 1.0, copies: int = 1, rows: int | None = None
    ) -> Tensor:
        inputs, kwargs = self._take(copies, rows)
        control.visits.clear()
        with control.prepared(multiplier):
            return output_tensor(control.forward(None, *inputs, **kwargs))

    def _held_control(self, held: set[str], visits: list[Visit]) -> Control:
        places = {visit.place for visit in visits}
        return Control(self.model, frozenset(held), self.rates, places=places)

    def _probe(
        self, control: Control, visit: Visit, found: list[Layout], expected: Tensor
    ) -> Layout:
        """The layout of a mask where values do not tell: dropping rows must change only those."""
        fitting = []
        for layout in found:
            control.probe = visit.place, layout, self.batch
            output = self._run(control, multiplier=0.5, copies=2)
            control.probe = None
            if output.dim() > self.batch_dim and output.shape[self.batch_dim] == 2 * self.batch:
                others = [
                    x.narrow(self.batch_dim, self.batch, self.batch) for x in (output, expected)
                ]
                if close(*others):
                    fitting.append(layout)
        return fitting[0] if len(fitting) == 1 else Layout(None, varies=True)

    def _independent(
        self, control: Control, layouts: dict[Place, Layout], output: Tensor
    ) -> tuple[bool, str]:
        """Whether rows can carry samples: each has its own mask, and none sees another."""
        alone = [str(place) for place, layout in layouts.items() if layout.dim is None]
        if alone:
            return False, f"rows share the mask of {', '.join(alone)}"
        if output.dim() <= self.batch_dim or output.shape[self.batch_dim] != 2 * self.batch:
            return False, "the output has another batch dimension than the input"
        try:
            single = self._run(control, multiplier=0.5, rows=1)
        except Exception as error:  # any failure of the user's model on a single row
            return False, f"the model fails on a single row: {type(error).__name__}"
        first = output.narrow(self.batch_dim, 0, 1)
        again = output.narrow(self.batch_dim, self.batch, 1)
        if not (close(single, first) and close(again, first)):
            return False, "the rows of a batch influence each other"
        return True, ""

    def _eval_output(self) -> Tensor:
        """What model.eval() gives; refuses dropout that is on even there."""
        control = Control(self.model)
        detector = Detector(control)
        inputs, kwargs = self._take()
        with _evaluating(self.model), control.watching(), detector:
            output = output_tensor(self.model(*inputs, **kwargs))
        if detector.draws:
            raise SiteError(
                f"random numbers are drawn even in eval mode: {_where(detector.draws)}. Then there "
                "is no deterministic member: gate that dropout on self.training"
            )
        return output


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without the encoder's fast path, which alone zeroes padded positions."""
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with eval_mode(model):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _own(visit: Visit) -> Tensor | None:
    """The values behind a mask, where they have its dimensions."""
    value = visit.value
    return value if value is not None and value.dim() == len(visit.shape) else None


def _where(draws: list[Draw]) -> str:
    return ", ".join(sorted({f"{draw.module or '(root)'} ({draw.op})" for draw in draws}))
