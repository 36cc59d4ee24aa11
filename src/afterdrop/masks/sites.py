"""Every dropout site of a module: what is random, at which rate, and how it is controlled."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from afterdrop.errors import SiteError
from afterdrop.masks.control import Control, Place, Visit
from afterdrop.masks.dry_run import DryRun
from afterdrop.masks.layout import Layout
from afterdrop.masks.outputs import full_precision

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


def check_model(model: object) -> None:
    """Refuses what is no module, and what no control reaches."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise SiteError(f"model is {kind}; give a torch.nn.Module that was made")
    if hasattr(model, "_orig_mod"):
        raise SiteError(
            "the model went through torch.compile, where its masks are out of reach; give the one "
            "before, model._orig_mod"
        )


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
    check_model(model)
    rates = (rates,) if isinstance(rates, str) else tuple(rates)
    noise = (noise,) if isinstance(noise, str) else tuple(noise)
    unknown = set(noise) - {name for name, _ in model.named_modules()}
    if unknown:
        raise SiteError(f"noise={noise!r}: the model has no module {sorted(unknown)}")
    dry = DryRun(model, inputs, kwargs, rates, batch_dim)
    with torch.no_grad(), full_precision(), dry.undone():
        # Norms with a forward of their own are looked at first: they may contain dropout.
        held = {n for n, m in model.named_modules() if _is_plain_norm(m)} | set(noise)
        visits, row_bytes, off = dry.discover(held)
        dry.check_declared(visits, off)
        held |= {name for name, _ in off}
        if off:
            visits = dry.confirm(held, visits)
        layouts, batched, reason = dry.double(held, visits)
        dry.compare(held, layouts)
    left = tuple(off) + tuple((name, "declared as noise") for name in noise)
    found = _sites(visits)
    return Sites(found, left, rates, batched, reason, row_bytes, frozenset(held), layouts)


def _is_plain_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) and type(module).forward.__module__.startswith("torch.")


def _sites(visits: list[Visit]) -> tuple[Site, ...]:
    calls = Counter(visit.place for visit in visits)
    first = {visit.place: visit for visit in reversed(visits)}
    return tuple(
        Site(str(place), first[place].op, first[place].rate, number)
        for place, number in calls.items()
    )
