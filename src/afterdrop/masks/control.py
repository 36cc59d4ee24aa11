"""Control of every dropout site of a module, at operator level.

Inside `Control`, modules are in train mode except those whose training does something else than
dropout (normalisation statistics, noise), so code gated on `self.training` shows its sites, and a
torch function mode answers every random operator with masks that are ours. On leaving, each
module's mode, each declared rate and each replaced forward is what it was, exception or not.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from afterdrop.errors import SiteError
from afterdrop.masks.keep import Keep
from afterdrop.masks.layout import Layout
from afterdrop.masks.operators import HANDLERS
from afterdrop.masks.rates import UNSCALED, Multipliers, scaled_attributes
from afterdrop.masks.row_masks import keep_mask, row_uniforms
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import site_key


class Place(NamedTuple):
    """A dropout operation in the code: a module and which of its operations it is."""

    module: str
    number: int

    def __str__(self) -> str:
        name = self.module or "(root)"
        return f"{name}#{self.number}" if self.number else name


class Visit(NamedTuple):
    """One execution of a random operation, as seen by a dry run."""

    place: Place
    call: int
    op: str
    rate: float | None
    shape: tuple[int, ...]
    value: Tensor | None
    raw: bool


class _Frame:
    def __init__(self, name: str, call: int, held: bool) -> None:
        self.name, self.call, self.held, self.number = name, call, held, 0


class Control(TorchFunctionMode):
    """Answers the random operators of a model's forward passes.

    Args:
        model: The module.
        held: Modules to leave in eval mode (their names).
        rates: Declared attributes that hold rates of masks which the model draws itself.
        layouts: Where the rows lie at each place, from a dry run. None: a dry run, where nothing
            is dropped and each operation is noted in `visits`.
        places: Where dropout was seen with no module held: in held modules, dropout that their
            mode switches off is forced on at these places.
    """

    def __init__(
        self,
        model: nn.Module,
        held: frozenset[str] = frozenset(),
        rates: Sequence[str] = (),
        layouts: dict[Place, Layout] | None = None,
        places: Collection[Place] = (),
    ) -> None:
        super().__init__()
        self.model, self.held, self.rates, self.layouts = model, held, tuple(rates), layouts
        self.places = frozenset(places if layouts is None else layouts)
        self.names = {id(module): name for name, module in model.named_modules()}
        self.rows: Rows | None = None
        self.draw = keep_mask  # a faster form of it may take its place
        self.visits: list[Visit] = []
        self.constant = 0.999  # what uniforms are in a dry run: nothing is dropped
        self.probe: tuple[Place, Layout, int] | None = None
        self._frames: list[_Frame] = []
        self._calls: Counter[str] = Counter()

    def arrive(self) -> tuple[Place, int]:
        """The place of the operation that runs now, and which call of its module this is."""
        if not self._frames:
            raise SiteError("a random operation ran outside the model's forward pass")
        frame = self._frames[-1]
        place = Place(frame.name, frame.number)
        frame.number += 1
        return place, frame.call

    def forces(self, at: tuple[Place, int]) -> bool:
        """Whether dropout that is switched off here is only so because the module is held."""
        return self._frames[-1].held and at[0] in self.places

    @property
    def module(self) -> str:
        """The name of the running module."""
        return self._frames[-1].name if self._frames else ""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, func, *args, **(kwargs or {}))

    def visit(
        self,
        op: str,
        rate: float,
        like: Tensor,
        value: Tensor | None,
        at: tuple[Place, int] | None = None,
    ) -> Keep | None:
        """The mask of a dropout operation, or None where nothing is dropped (a dry run)."""
        place, call = at or self.arrive()
        if self.layouts is None:
            self.visits.append(Visit(place, call, op, rate, tuple(like.shape), value, False))
            if self.probe is None or self.probe[0] != place:
                return None
            return Keep(self._probed(torch.ones_like(like), 0.0), 0.0, None, ())
        rows, layout = self._running(), self._layout(place, op)
        multipliers = UNSCALED if layout.scaled else rows.multipliers
        rates = multipliers.rates(str(place), rate)
        if max(rates) >= 1:
            raise SiteError(
                f"{op} in module {place} has rate {rate:g}: multiplier {multipliers.largest:g} x "
                f"{rate:g} drops everything; use multipliers so that multiplier x rate < 1"
            )
        return self.draw(rows, site_key(rows.plan.seed, *place, call), layout, like, rates)

    def raw_uniforms(self, op: str, rate: float | None, like: Tensor) -> Tensor:
        """Uniforms for a mask that the model draws itself, at its declared rate."""
        place, call = self.arrive()
        if self.layouts is None:
            self.visits.append(Visit(place, call, op, rate, tuple(like.shape), None, True))
            return self._constant_uniforms(place, like)
        rows, layout = self._running(), self._layout(place, op)
        return row_uniforms(rows, site_key(rows.plan.seed, *place, call), layout, like)

    def _constant_uniforms(self, place: Place, like: Tensor) -> Tensor:
        u = torch.full_like(like, self.constant, dtype=torch.float32)
        if self.probe is None or self.probe[0] != place:
            return u
        return self._probed(u, 1 - self.constant)

    def _probed(self, x: Tensor, value: float) -> Tensor:
        """`x` with `value` in the first half of the rows, as the probed layout has them."""
        assert self.probe is not None
        _, layout, rows = self.probe
        assert layout.dim is not None
        outer = layout.order == "outer"
        x = x.contiguous()
        x.unflatten(layout.dim, (-1, 2, rows) if outer else (2, -1)).select(
            layout.dim + outer, 0
        ).fill_(value)
        return x

    def forward(self, rows: Rows | None, *args: Any, **kwargs: Any) -> Any:
        """One forward pass of the model with the masks of `rows`."""
        self.rows = rows
        self._calls.clear()
        self._frames.clear()
        with self:
            return self.model(*args, **kwargs)

    def _running(self) -> Rows:
        assert self.rows is not None
        return self.rows

    def _layout(self, place: Place, op: str) -> Layout:
        assert self.layouts is not None
        if place in self.layouts:
            return self.layouts[place]
        # A loop may run longer than in the dry run: its operations all look alike.
        others = {layout for p, layout in self.layouts.items() if p.module == place.module}
        if len(others) == 1:
            return others.pop()
        raise SiteError(
            f"{op} in module {place} was not seen in the dry run: the model takes another path on "
            "this input; evaluate with a first batch that takes every path"
        )

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module), "(outside)")
        self._frames.append(_Frame(name, self._calls[name], name in self.held))
        self._calls[name] += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._frames:
            self._frames.pop()

    @contextlib.contextmanager
    def watching(self) -> Iterator["Control"]:
        """Knows which module is running, and changes nothing."""
        register = torch.nn.modules.module
        hooks = [
            register.register_module_forward_pre_hook(self._enter),
            register.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield self
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def prepared(
        self, multipliers: Multipliers | Sequence[float] | float = UNSCALED
    ) -> Iterator["Control"]:
        """Sets modes, declared rates (times a multiplier) and hooks; restores all of it on exit."""
        modes = [(module, module.training) for module in self.model.modules()]
        replaced = [
            (module, module.__dict__.get("forward"))
            for module in self.model.modules()
            if drop_path_rate(module) is not None
        ]
        try:
            for name, module in self.model.named_modules():
                module.training = name not in self.held
            for module, _ in replaced:
                module.__dict__["forward"] = self._drop_path(module)
            scaled = scaled_attributes(self.model, self.rates, Multipliers.of(multipliers))
            with scaled, self.watching():
                yield self
        finally:
            for module, forward in replaced:
                del module.__dict__["forward"]
                if forward is not None:
                    module.__dict__["forward"] = forward
            for module, mode in modes:
                module.training = mode

    def _drop_path(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """Stochastic depth: whole rows (or the whole batch) dropped, as the module would."""

        def forward(x: Tensor) -> Tensor:
            rate = drop_path_rate(module)
            if not rate:
                return x
            shape = [1] * x.dim()
            if getattr(module, "mode", "row") == "row":
                shape[0] = x.shape[0]
            keep = self.visit("drop_path", rate, x.new_empty(()).expand(shape), x)
            if keep is None:
                return x
            if _rescales(module):
                return keep.drop(x)
            return (keep.unfold(x) * keep.mask).reshape(x.shape)

        return forward


def drop_path_rate(module: nn.Module) -> float | None:
    """The rate of a stochastic depth module of timm, transformers or torchvision, or None.

    Known by the class name (copies of them are common) and the attribute that holds the rate.
    """
    name = type(module).__name__
    attribute = (
        "p" if name == "StochasticDepth" else "drop_prob" if name.endswith("DropPath") else ""
    )
    rate: Any = getattr(module, attribute, None) if attribute else None
    return float(rate) if isinstance(rate, int | float) else None


def _rescales(module: nn.Module) -> bool:
    return bool(getattr(module, "scale_by_keep", True))
