"""Control of every random operator of a module's forward pass.

A torch function mode intercepts the operators. While it is prepared, modules are in train mode,
except those whose training does something other than dropout (normalisation statistics, noise), so
code that is gated on `self.training` reaches its dropout. On exit, each module's mode, declared
rate and replaced forward is restored, even after an exception.
"""

import abc
import contextlib
import operator
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from afterdrop.errors import SiteError
from afterdrop.masks.attribute_contents import Contents
from afterdrop.masks.draws_ahead import DrawsAhead
from afterdrop.masks.operators import HANDLERS, Call, Place
from afterdrop.masks.rates import UNSCALED, Multipliers, scaled_attributes
from afterdrop.masks.rows import Layout, RowMask, Rows, draw_row_mask, row_uniforms
from afterdrop.masks.stochastic_depth import replaced_forwards
from afterdrop.masks.uniforms import site_key

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called")


class _Frame:
    """A running module: its name, which call of it this is, and its random operations so far."""

    def __init__(self, name: str, call: int, held: bool) -> None:
        self.name, self.call, self.held, self.operations = name, call, held, 0


class OperatorMode(TorchFunctionMode, abc.ABC):
    """Intercepts the random operators of a model; subclasses supply the masks (`MaskSource`).

    Args:
        model: The module.
        held: Names of modules that stay in eval mode.
        rates: Declared attributes that hold the rates of masks which the model draws itself.
        places: Where dropout ran while no module was held. In held modules, dropout that their
            mode switches off is forced on at these places.

    Attributes:
        masked: Whether the running pass has come to its first mask, for passes under masks.
    """

    def __init__(
        self,
        model: nn.Module,
        held: frozenset[str] = frozenset(),
        rates: Sequence[str] = (),
        places: Collection[Place] = (),
    ) -> None:
        super().__init__()
        self.model, self.held, self.rates = model, held, tuple(rates)
        self.places = frozenset(places)
        self.names = {id(module): name for name, module in model.named_modules()}
        self._modules = list(model.modules())
        self._frames: list[_Frame] = []
        self._calls: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self.masked = False
        self.switch_calls: list[Callable[[], None]] = []
        self.single_draw: float | None = None

    @abc.abstractmethod
    def mask(
        self, op: str, rate: float, like: Tensor, value: Tensor, call: Call | None = None
    ) -> RowMask | None:
        """See `MaskSource.mask`."""

    @abc.abstractmethod
    def uniforms(self, op: str, rate: float | None, like: Tensor) -> Tensor:
        """See `MaskSource.uniforms`."""

    def locate(self) -> Call:
        """See `MaskSource.locate`."""
        if not self._frames:
            raise SiteError("a random operation ran outside the model's forward pass")
        frame = self._frames[-1]
        place = Place(frame.name, frame.operations)
        frame.operations += 1
        return Call(place, frame.call)

    def on_switch(self) -> None:
        """Called when another module begins or ends, while `module` is still the one before."""
        for call in self.switch_calls:
            call()

    def is_forced(self, call: Call) -> bool:
        """See `MaskSource.is_forced`."""
        return self._frames[-1].held and call.place in self.places

    @property
    def running(self) -> bool:
        """Whether a module of the model is running."""
        return bool(self._frames)

    @property
    def module(self) -> str:
        """The name of the running module."""
        return self._frames[-1].name if self._frames else ""

    @property
    def declared(self) -> bool:
        """See `MaskSource.declared`."""
        return bool(self.rates)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, func, *args, **(kwargs or {}))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass of the model, whose random operators are intercepted."""
        self._calls.clear()
        self._frames.clear()
        self.masked = False
        with self:
            return self.model(*args, **kwargs)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Self]:
        """Follows which module of the model is running in this thread, and changes nothing.

        The hooks are those of the modules themselves: the first before a module's own hooks, the
        last after them, so that what a hook draws belongs to its module.
        """
        self._thread = threading.get_ident()
        scripted = torch.jit.ScriptModule
        modules = [module for module in self._modules if not isinstance(module, scripted)]
        # As torch's `register_forward_hook` does, without its handles: they take longer than a
        # pass of a model with thousands of modules.
        number = object()
        try:
            for module in modules:
                hooks: Any = module.__dict__
                hooks["_forward_pre_hooks"][number] = self._enter
                hooks["_forward_pre_hooks"].move_to_end(number, last=False)
                hooks["_forward_hooks"][number] = self._leave
                hooks["_forward_hooks_always_called"][number] = True
            yield self
        finally:
            for module in modules:
                for table in _HOOKS:
                    module.__dict__[table].pop(number, None)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self.on_switch()
            name = self.names[id(module)]
            self._frames.append(_Frame(name, self._calls[name], name in self.held))
            self._calls[name] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._frames:
            self.on_switch()
            self._frames.pop()

    @contextlib.contextmanager
    def prepared(
        self, multipliers: Multipliers | Sequence[float] | float = UNSCALED
    ) -> Iterator[Self]:
        """Sets the modules' modes and scales the declared rates; restores all of it on exit.

        Args:
            multipliers: Of the declared rates. More than one is an error if there are any.

        Raises:
            SiteError: If modules were added, replaced or removed.
        """
        self._require_same_modules()
        modes = [module.training for module in self._modules]
        try:
            for module in self._modules:
                _set_mode(module, self.names[id(module)] not in self.held)
            with (
                scaled_attributes(self.model, self.rates, Multipliers.of(multipliers)),
                replaced_forwards(self._modules, self),
                self.watching(),
            ):
                yield self
        finally:
            for module, mode in zip(self._modules, modes):
                _set_mode(module, mode)

    def _require_same_modules(self) -> None:
        now = list(self.model.modules())
        if len(now) != len(self._modules) or not all(map(operator.is_, now, self._modules)):
            raise SiteError(
                "modules of the model were added, replaced or removed after its dropout sites were "
                "found; make a new predictor, or evaluate again"
            )


def _set_mode(module: nn.Module, training: bool) -> None:
    """Sets the mode of a module, past torch's slow assignment unless the module has its own."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module.__dict__["training"] = training
    else:
        module.training = training


class Control(OperatorMode):
    """Runs forward passes of a model under the masks of M × S × B rows.

    Args:
        model: The module.
        held: Names of modules that stay in eval mode.
        rates: Declared attributes that hold the rates of masks which the model draws itself.
        layouts: Where the rows lie at each place, from a dry run.
        volatile: Names of modules whose attributes passes change; restored after each pass.

    Attributes:
        draw: Draws the masks: `draw_row_mask` with `DrawsAhead`, or a function with its results.
        before_mask: Called before the first mask of each pass, if it is not None.
    """

    def __init__(
        self,
        model: nn.Module,
        held: frozenset[str],
        rates: Sequence[str],
        layouts: dict[Place, Layout],
        volatile: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(model, held, rates, places=layouts)
        self.layouts = layouts
        self.volatile = [model.get_submodule(name) for name in volatile]
        ahead = DrawsAhead(layouts)
        self.draw: Callable[..., RowMask] = partial(draw_row_mask, draw=ahead.uniforms)
        self.before_mask: Callable[[], None] | None = None
        self._rows: Rows | None = None

    def forward(self, rows: Rows, *args: Any, **kwargs: Any) -> Any:
        """One forward pass of the model with the masks of `rows`."""
        self._rows = rows
        before = [dict(module.__dict__) for module in self.volatile]
        contents = Contents(before)
        try:
            return self.run(*args, **kwargs)
        finally:
            for module, attributes in zip(self.volatile, before):
                for name in module.__dict__.keys() - attributes.keys():
                    del module.__dict__[name]
                module.__dict__.update(attributes)
            contents.restore()

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
        """The rows of the running pass, which now comes to a mask."""
        assert self._rows is not None
        if not self.masked and self.before_mask is not None:
            self.before_mask()
        self.masked = True
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
