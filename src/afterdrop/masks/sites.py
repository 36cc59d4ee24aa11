"""Finding every dropout site of a module, verified by dry runs.

The dry runs use the user's own input and drop nothing:

    1. discover   train mode under control: which operators ask for masks, which modules draw other
                  random numbers or change their state (those are held in eval mode from here on)
    2. confirm    with those modules held: no site of the first pass may be lost
    3. double     the same rows twice: where the rows lie in each mask, and whether rows are
                  independent, so that samples can be batched with the examples
    4. compare    with every rate at 0, the output must be that of model.eval()

What cannot be verified raises a `SiteError` that names the modules and the remedy.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afterdrop.errors import SiteError
from afterdrop.masks.control import Control, Place, Visit
from afterdrop.masks.detect import Detector, Draw
from afterdrop.masks.rows import Layout, batch_size, probe_layout, take_rows, tensors

_NORMS = nn.modules.batchnorm._NormBase


@dataclasses.dataclass(frozen=True)
class Site:
    """A dropout site: a module, the operator, its rate, and how often one pass runs it.

    `rate` is None for masks that the model draws itself in a way that does not show the rate.
    """

    name: str
    op: str
    rate: float | None
    calls: int


@dataclasses.dataclass(frozen=True)
class Sites:
    """What is random in a module, and how it is controlled. Iterates over `Site`.

    Attributes:
        sites: The dropout sites.
        off: Modules left in eval mode because their training-time behaviour is not dropout, with
            what they would have done.
        rates: Declared attributes that hold rates.
        batched: Whether samples run as extra rows of a batch; `reason` says why not.
        row_bytes: Bytes alive at the peak of a pass, per row.
    """

    sites: tuple[Site, ...]
    off: tuple[tuple[str, str], ...]
    rates: tuple[str, ...]
    batched: bool
    reason: str
    row_bytes: int
    held: frozenset[str] = dataclasses.field(repr=False)
    layouts: dict[Place, Layout] = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    @property
    def calls(self) -> int:
        """Random operations in one pass."""
        return sum(site.calls for site in self.sites)

    @property
    def shared(self) -> bool:
        """Whether examples share a mask, so that their mask errors are not independent."""
        return any(layout.dim is None for layout in self.layouts.values())

    def control(self, model: nn.Module) -> Control:
        """The control of `model` that these dry runs found."""
        return Control(model, self.held, self.rates, self.layouts)

    def __str__(self) -> str:
        width = max([4, *(len(site.name) for site in self.sites)])
        lines = [f"{'site':<{width}}  {'operator':<15}  {'rate':>6}  calls"]
        for site in self.sites:
            rate = "own" if site.rate is None else f"{site.rate:.4g}"
            lines.append(f"{site.name:<{width}}  {site.op:<15}  {rate:>6}  {site.calls:>5}")
        how = "batched with the examples" if self.batched else f"one pass each ({self.reason})"
        lines.append(f"{len(self)} sites, {self.calls} random operations a pass; samples: {how}")
        lines += [f"left off: {name or '(root)'}: {what}" for name, what in self.off]
        return "\n".join(lines)


def find_sites(
    model: nn.Module,
    *inputs: Any,
    rates: Sequence[str] = (),
    noise: Sequence[str] = (),
    batch_dim: int = 0,
    **kwargs: Any,
) -> Sites:
    """Finds every dropout site of a module by dry runs on an input; changes nothing.

    Args:
        model: Any module.
        *inputs: Positional inputs of the model, a few examples.
        rates: Dotted paths of attributes that hold the rates of masks which the model draws
            itself (locked, embedding or weight dropout), such as "dropouti" or "encoder.p".
        noise: Names of modules whose random draws are not dropout and stay off.
        batch_dim: The batch dimension of the input tensors.
        **kwargs: Keyword inputs of the model.

    Returns:
        The sites; prints as a table.

    Raises:
        SiteError: If there is no dropout, or random draws that cannot be controlled.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        >>> print(find_sites(net, torch.randn(3, 4)))
        site  operator           rate  calls
        1     dropout             0.5      1
        1 sites, 1 random operations a pass; samples: batched with the examples
    """
    dry = _DryRun(model, inputs, kwargs, tuple(rates), batch_dim)
    with torch.no_grad(), dry.undone():
        held = {name for name, m in model.named_modules() if isinstance(m, _NORMS)} | set(noise)
        visits, detector, off = dry.discover(held)
        dry.check_declared(visits)
        held |= {name for name, _ in off}
        if off:
            visits = dry.confirm(held, visits)
        layouts, batched, reason = dry.double(held, visits)
        dry.compare(held)
    sites = _sites(visits)
    rows = max(1, dry.batch)
    names = tuple(off) + tuple((name, "declared as noise") for name in noise)
    return Sites(
        sites,
        names,
        tuple(rates),
        batched,
        reason,
        -(-detector.peak_bytes // rows),
        frozenset(held),
        layouts,
    )


class _DryRun:
    def __init__(
        self, model: nn.Module, inputs: Any, kwargs: Any, rates: tuple[str, ...], batch_dim: int
    ) -> None:
        self.model, self.rates, self.batch_dim = model, rates, batch_dim
        self.batch = batch_size((inputs, kwargs), batch_dim)
        self.inputs, self.kwargs = inputs, kwargs

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Whatever the dry runs do to buffers and to torch's generators is undone."""
        buffers = [(b, b.detach().clone()) for b in self.model.buffers()]
        devices = sorted({b.device.index or 0 for b in self.model.parameters() if b.is_cuda})
        with torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                for buffer, before in buffers:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)

    def run(self, control: Control, multiplier: float = 1.0, copies: int = 1) -> Tensor:
        inputs, kwargs = take_rows(
            (self.inputs, self.kwargs), self.batch_dim, self.batch, 0, self.batch, copies
        )
        control.visits.clear()
        with control.prepared(multiplier):
            return output_tensor(control.forward(None, *inputs, **kwargs))

    def discover(self, held: set[str]) -> tuple[list[Visit], Detector, list[tuple[str, str]]]:
        control = Control(self.model, frozenset(held), self.rates)
        detector = Detector(control)
        with detector:
            self.run(control)
        stray: dict[str, set[str]] = {}
        for draw in detector.draws:
            stray.setdefault(draw.module, set()).add(draw.op)
        off = {name: "draws " + ", ".join(sorted(ops)) for name, ops in stray.items()}
        for name in sorted(detector.changed - set(off)):
            off[name] = "changes its buffers in training"
        return list(control.visits), detector, sorted(off.items())

    def check_declared(self, visits: list[Visit]) -> None:
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
            raise SiteError(
                "the model has no dropout: no operator dropped anything in a train-mode pass "
                "(rates of 0 do not count). There is nothing to choose from: train it with dropout"
            )

    def confirm(self, held: set[str], before: list[Visit]) -> list[Visit]:
        control = Control(self.model, frozenset(held), self.rates)
        detector = Detector(control)
        with detector:
            self.run(control)
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
                "module that must stay in eval mode (it also draws noise); move the dropout into "
                "a module of its own, for example nn.Dropout"
            )
        return list(control.visits)

    def double(self, held: set[str], visits: list[Visit]) -> tuple[dict[Place, Layout], bool, str]:
        control = Control(self.model, frozenset(held), self.rates)
        unbatched = {v.place: Layout(None, varies=True) for v in visits}
        try:
            output = self.run(control, copies=2)
        except Exception as error:  # any failure of the user's model at another batch size
            return unbatched, False, f"the model fails on twice the rows: {type(error).__name__}"
        if len(control.visits) != len(visits):
            return unbatched, False, "the number of random operations depends on the batch size"
        layouts: dict[Place, Layout] = {}
        for before, after in zip(visits, control.visits):
            doubled = after.shape if after.value is None else after.value
            if after.value is not None and after.value.shape != after.shape:
                doubled = after.shape
            layout = probe_layout(before.shape, doubled, self.batch)
            if layouts.setdefault(before.place, layout) != layout:
                layouts[before.place] = Layout(None, varies=True)
        alone = [str(place) for place, layout in layouts.items() if layout.dim is None]
        if alone:
            return layouts, False, f"rows share the mask of {', '.join(alone)}"
        if output.dim() <= self.batch_dim or output.shape[self.batch_dim] != 2 * self.batch:
            return layouts, False, "the output has another batch dimension than the input"
        first, second = output.unflatten(self.batch_dim, (2, -1)).unbind(self.batch_dim)
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-4, equal_nan=True):
            return layouts, False, "the rows of a batch influence each other"
        return layouts, True, ""

    def compare(self, held: set[str]) -> None:
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            self.model.eval()
            expected = output_tensor(self.model(*self.inputs, **self.kwargs))
        finally:
            for module, mode in modes:
                module.training = mode
        control = Control(self.model, frozenset(held), self.rates)
        for constant in (1.0 - 2.0**-24, 0.0) if self.rates else (control.constant,):
            control.constant = constant
            output = self.run(control, multiplier=0.0)
            scale = expected.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
            close = torch.allclose(output, expected, rtol=1e-3, atol=1e-4 * scale, equal_nan=True)
            if not close:
                raw = sorted({str(v.place) for v in control.visits if v.raw})
                hint = f" Undeclared masks may be in: {', '.join(raw)}." if raw else ""
                raise SiteError(
                    "with every dropout rate at 0 the model does not give what model.eval() gives "
                    f"(largest difference {(output - expected).abs().max().item():.3g}).{hint} "
                    "Something else changes in training: declare its rate (rates=) or keep its "
                    "module in eval mode (noise=)"
                )


def _sites(visits: list[Visit]) -> tuple[Site, ...]:
    calls = Counter(visit.place for visit in visits)
    first = {visit.place: visit for visit in reversed(visits)}
    return tuple(
        Site(str(place), first[place].op, first[place].rate, number)
        for place, number in calls.items()
    )


def _where(draws: list[Draw]) -> str:
    return ", ".join(sorted({f"{draw.module or '(root)'} ({draw.op})" for draw in draws}))


def output_tensor(output: Any) -> Tensor:
    """The logits of what a model returned: a tensor, an object with `.logits`, or a tuple.

    Raises:
        SiteError: If there is no floating point tensor in it.
    """
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if not found:
        raise SiteError(
            f"the model returned {type(output).__name__}, which holds no logits; return a tensor, "
            "a tuple whose first tensor is the logits, or an object with .logits"
        )
    return found[0]
