"""Every dropout site of a module: what is random, at which rate, and how it is controlled.

`find_sites` verifies what it finds by dry runs:
    1. discover      in train mode: which operators ask for masks, which modules draw other random
                     numbers or change their buffers (these stay in eval mode from here on); again
                     until there are no more of them, since LayerDrop may skip modules in a pass
    2. confirm       with these modules in eval mode: no site of the first pass may be lost
    3. find layouts  with twice the rows, and with one row: where the rows lie in each mask, and
                     whether rows are independent, so that samples can be batched with the examples
    4. check eval    with every rate at 0, the output must be that of model.eval()
    5. find prefix   which modules finish before the first site, so that they run once per batch
What cannot be verified raises a `SiteError` that names the modules and the remedy.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import nn

from afterdrop.errors import SiteError
from afterdrop.masks.control import Control
from afterdrop.masks.discovery import (
    WITHOUT_EFFECT,
    check_declared,
    check_eval_output,
    confirm,
    discover,
)
from afterdrop.masks.dry_run import DryRun, Visit, find_layouts
from afterdrop.masks.model_call import LogitsPlace, full_precision
from afterdrop.masks.model_guard import Reset, guarded
from afterdrop.masks.operators import Place
from afterdrop.masks.prefix import Prefix
from afterdrop.masks.prefix_search import find_prefix
from afterdrop.masks.rows import Layout
from afterdrop.masks.stochastic_depth import drop_path_of

_SHOWN = 3  # modules per line
_NORMS = nn.modules.batchnorm._NormBase


@dataclasses.dataclass(frozen=True)
class Site:
    """A dropout site.

    Attributes:
        name: The name of the module; "#1" and so on are appended to its second and later sites.
        op: The operator.
        rate: The probability of dropping, or None if the model draws the mask itself in a way that
            does not show the rate.
        calls: How often a forward pass runs it.
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
        off: Modules kept in eval mode because their training-time behaviour is not dropout, with
            what they would have done.
        rates: Declared attributes that hold rates.
        batched: Whether samples run as extra rows of a batch.
        reason: If not, why.
        row_bytes: Bytes alive at the peak of a pass, per row.
        held: Names of all modules that stay in eval mode.
        layouts: Where the rows lie in each mask.
        volatile: Names of modules whose attributes a forward pass changes.
        largest_bytes: Bytes of the largest tensor of a pass, per row.
        prefix: The modules before the first site, which run once per batch; None if all modules
            run in each pass.
    """

    sites: tuple[Site, ...]
    off: tuple[tuple[str, str], ...]
    rates: tuple[str, ...]
    batched: bool
    reason: str
    row_bytes: int
    held: frozenset[str] = dataclasses.field(repr=False)
    layouts: dict[Place, Layout] = dataclasses.field(repr=False)
    volatile: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    largest_bytes: int = 0
    prefix: Prefix | None = dataclasses.field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    @property
    def calls(self) -> int:
        """The number of random operations per pass."""
        return sum(site.calls for site in self.sites)

    @property
    def shared(self) -> bool:
        """Whether examples share a mask, which makes their mask errors dependent."""
        return any(layout.dim is None for layout in self.layouts.values())

    @property
    def sampled_row_bytes(self) -> int:
        """Bytes alive at the peak of a pass under masks, per row."""
        return self.row_bytes if self.prefix is None else self.prefix.row_bytes

    @property
    def sampled_largest_bytes(self) -> int:
        """Bytes of the largest tensor of a pass under masks, per row."""
        return self.largest_bytes if self.prefix is None else self.prefix.largest_bytes

    def without_prefix(self) -> Self:
        """These sites for passes that run all modules."""
        return dataclasses.replace(self, prefix=None)

    def drawn_per_pass(self) -> Self:
        """These sites with masks that are drawn for a whole pass, whose rows are not the examples.

        If samples run as rows, the rows are the examples, and nothing changes.
        """
        if self.batched:
            return self
        layouts = {
            place: layout
            if layout.dim is None
            else Layout(None, varies=True, stream=layout.stream, scaled=layout.scaled)
            for place, layout in self.layouts.items()
        }
        return dataclasses.replace(self, layouts=layouts)

    def control(self, model: nn.Module) -> Control:
        """A control of `model`, in which these sites were found."""
        return Control(model, self.held, self.rates, self.layouts, self.volatile)

    def __str__(self) -> str:
        width = max([4, *(len(site.name) for site in self.sites)])
        lines = [f"{'site':<{width}}  {'operator':<15}  {'rate':>6}  calls"]
        for site in self.sites:
            rate = "own" if site.rate is None else f"{site.rate:.4g}"
            lines.append(f"{site.name:<{width}}  {site.op:<15}  {rate:>6}  {site.calls:>5}")
        how = "batched with the examples" if self.batched else f"one per pass ({self.reason})"
        lines.append(f"{len(self)} sites, {self.calls} random operations per pass; samples: {how}")
        if self.prefix is not None:
            lines.append(f"computed once per batch: {_shown(self.prefix.names)}")
        for what in dict.fromkeys(what for _, what in self.off):
            names = [name or "(root)" for name, other in self.off if other == what]
            lines.append(f"left off: {_shown(names)}: {what}")
        return "\n".join(lines)

    @property
    def randomness_off(self) -> tuple[tuple[str, ...], ...]:
        """Modules whose random draws stay off although nobody declared them as noise.

        At multiplier 1 the model then differs from the one that was trained.
        """
        return effective_draws(self.off)


def effective_draws(off: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The entries of what is left off that are random draws with an effect on the output."""
    return tuple(
        entry
        for entry in off
        if entry[1].startswith("draws ") and not entry[1].endswith(WITHOUT_EFFECT)
    )


def check_model(model: object) -> None:
    """Checks that a model is a module whose operators can be intercepted."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise SiteError(f"model is {kind}; pass an instance of torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise SiteError(
            "the model is TorchScript, which hides its masks; pass the module that it was made from"
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise SiteError(
            "the model has tensors on the meta device, which hold no numbers; load its weights"
        )


def find_sites(
    model: nn.Module,
    *inputs: Any,
    rates: Sequence[str] = (),
    noise: Sequence[str] = (),
    batch_dim: int = 0,
    logits: LogitsPlace | None = None,
    reset: Reset | None = None,
    compute_once: bool = True,
    **kwargs: Any,
) -> Sites:
    """Finds every dropout site of a module.

    Runs the model on the inputs a few times and leaves it unchanged.

    Args:
        model: Any module.
        *inputs: Positional inputs of the model: a batch of a few examples.
        rates: Dotted paths of attributes that hold the rates of masks which the model draws
            itself (locked, embedding or weight dropout), such as "dropouti" or "encoder.p".
        noise: Names of modules whose random draws are not dropout; they stay in eval mode.
        batch_dim: The batch dimension of the input tensors.
        logits: Where the output holds its logits, if several of its tensors may be the logits: an
            index, a key or a function of the output.
        reset: Called with the model before each forward pass, to forget state that it keeps
            between calls.
        compute_once: Whether to look for modules that finish before the first site: their output
            does not depend on masks, and can be computed once per batch for all samples.
        **kwargs: Keyword inputs of the model.

    Returns:
        The sites. They print as a table.

    Raises:
        SiteError: If the model has no dropout, or random draws that cannot be controlled.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        >>> print(find_sites(net, torch.randn(3, 4)))
        site  operator           rate  calls
        1     dropout             0.5      1
        1 sites, 1 random operations per pass; samples: batched with the examples
        computed once per batch: 0
    """
    check_model(model)
    rates = (rates,) if isinstance(rates, str) else tuple(rates)
    noise = (noise,) if isinstance(noise, str) else tuple(noise)
    unknown = set(noise) - {name for name, _ in model.named_modules()}
    if unknown:
        raise SiteError(f"noise={noise!r}: the model has no module {sorted(unknown)}")
    with torch.no_grad(), guarded(model, reset), full_precision():
        dry = DryRun(model, inputs, kwargs, rates, batch_dim, logits)
        with dry.undone():
            return _find_sites(dry, noise, compute_once=compute_once)


def _find_sites(dry: DryRun, noise: tuple[str, ...], *, compute_once: bool) -> Sites:
    model = dry.model
    for module in model.modules():  # before draws are watched: modules are tried by drawing
        drop_path_of(module)
    # A norm with a forward of its own may contain dropout, so it is not held from the start.
    held = {n for n, m in model.named_modules() if _is_plain_norm(m)} | set(noise)
    found = discover(dry, held)
    while noisy := {name for name, _ in found.off} - held:
        held |= noisy
        found = found.joined(discover(dry, held))
    check_declared(found, model, dry.rates)
    visits, output = found.visits, found.output
    if found.off:
        visits, output = confirm(dry, held, visits)
    layouts, batched, reason = find_layouts(dry, held, visits)
    check_eval_output(dry, held, layouts, output)
    off = (*found.off, *((name, "declared as noise") for name in noise))
    found_sites = Sites(
        _sites(visits),
        off,
        dry.rates,
        batched,
        reason,
        found.row_bytes,
        frozenset(held),
        layouts,
        found.volatile,
        found.largest_bytes,
    )
    if not compute_once:
        return found_sites
    prefix = find_prefix(dry, found_sites.control(model), batched=batched)
    return dataclasses.replace(found_sites, prefix=prefix)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _is_plain_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) and type(module).forward.__module__.startswith("torch.")


def _sites(visits: list[Visit]) -> tuple[Site, ...]:
    calls = Counter(visit.place for visit in visits)
    first = {visit.place: visit for visit in reversed(visits)}
    return tuple(
        Site(str(place), first[place].op, first[place].rate, number)
        for place, number in calls.items()
    )
