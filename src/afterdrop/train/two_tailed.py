"""Two-tailed averaging: a short and a long running mean of the weights, with no start to tune.

Both means take in the weights after every step. After every validation interval of E steps:

    switch    if the short mean's XE is not worse than the long one's (or the long one's has not
              improved for `patience` intervals), the short mean becomes the long one, and a new
              short one begins
    forget    if the short mean's XE has not improved for `patience` intervals, a new one begins
    raw       if the weights themselves are better than the long mean, they are the model of the
              interval; if the long mean is only E steps long, both means begin anew

In every other case the model is the long mean. Only one mean is updated per step: the long one is

    long = (F · frozen + S · short) / (F + S)

with `frozen` the short mean at the last switch, over F steps, and S the steps of the short one. A
short mean that is forgotten is folded into `frozen`.

Source: Melis, "Two-Tailed Averaging: Anytime, Adaptive, Once-in-a-While Optimal Weight Averaging
for Better Generalization", 2022 (arXiv 2209.12581), which does not say how patient to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from afterdrop.train.averaging import WeightAverage

Weights = Literal["raw", "short", "long"]


@dataclass(frozen=True)
class Tails:
    """The state of the means beside their tensors: plain, JSON-serialisable values.

    Attributes:
        frozen: F, the steps of the frozen part of the long mean.
        short_best: The lowest XE of the short mean since it began; None before its first.
        short_stale: Intervals since then.
        long_best: The lowest XE of the long mean since the last switch.
        long_stale: Intervals since then.
    """

    frozen: int = 0
    short_best: float | None = None
    short_stale: int = 0
    long_best: float | None = None
    long_stale: int = 0


class TwoTailedAverage:
    """The two means of a model's parameters over steps.

    Args:
        model: The model whose parameters `update` reads.
        patience: Intervals without improvement after which a mean is given up; None for never.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = TwoTailedAverage(model)
        >>> for value in (1.0, 2.0, 6.0):
        ...     _ = nn.init.constant_(model.weight, value)
        ...     average.update()
        ...     if value == 1.0:
        ...         average.settle({"raw": 0.5, "long": 0.4}, steps=1)
        'long'
        >>> [average.mean(which)["weight"].item() for which in ("short", "long")]
        [4.0, 3.0]
    """

    def __init__(self, model: nn.Module, patience: int | None = None) -> None:
        self.patience, self.tails = patience, Tails()
        self._short = WeightAverage(model)
        self._frozen: dict[str, Tensor] = {}
        self._parameters = dict(model.named_parameters())

    @property
    def count(self) -> int:
        """The steps of the long mean."""
        return self.tails.frozen + self._short.count

    def update(self) -> None:
        """Adds the current parameters to both means."""
        self._short.update()

    def candidates(self) -> tuple[Weights, ...]:
        """The weights to validate: those that are not equal to others by construction."""
        if self.count == 0:
            return ("raw",)
        return ("raw", "short", "long") if self.tails.frozen else ("raw", "long")

    @torch.no_grad()
    def mean(self, which: Weights) -> dict[str, Tensor]:
        """One of the two means by parameter name; the long one is a copy unless it has one part."""
        if which == "short" or not self.tails.frozen:
            return self._short.tensors()
        if not self._short.count:
            return dict(self._frozen)
        names, share = list(self._frozen), self._short.count / self.count
        short = self._short.tensors()
        frozen = list(self._frozen.values())
        return dict(zip(names, torch._foreach_lerp(frozen, [short[n] for n in names], share)))

    def tensors(self) -> dict[str, Tensor]:
        """The long mean by parameter name."""
        return self.mean("long")

    @contextmanager
    def in_place(self, which: Weights = "long") -> Iterator[None]:
        """Gives the model the mean as its weights; "raw" changes nothing."""
        if which == "raw" or self.count == 0:
            yield
            return
        means, before = self.mean(which), {n: p.data for n, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.data = means[name]
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = before[name]

    def settle(self, xe: Mapping[Weights, float], steps: int) -> Weights:
        """Applies the rules after a validation.

        Args:
            xe: That of each of the `candidates`.
            steps: E, the steps of an interval.

        Returns:
            Which of the candidates is the model of the interval. Unless it is "raw", `tensors` is
            now this one.
        """
        if self.count == 0:
            return "raw"
        model: Weights = "long"
        long, short = xe["long"], xe.get("short", xe["long"])
        self._compare(short, long)
        if short <= long or self._gives_up(self.tails.long_stale):
            self._switch(short)
            model, long = ("short" if "short" in xe else "long"), short
        elif self._gives_up(self.tails.short_stale):
            self._forget()
        if not xe["raw"] < long:
            return model
        if self.count <= steps:
            self._begin({}, 0, Tails())
        return "raw"

    def _gives_up(self, stale: int) -> bool:
        return self.patience is not None and stale >= self.patience

    def _compare(self, short: float, long: float) -> None:
        tails = self.tails
        if tails.short_best is None or short < tails.short_best:
            tails = replace(tails, short_best=short, short_stale=0)
        else:
            tails = replace(tails, short_stale=tails.short_stale + 1)
        if tails.long_best is None or long < tails.long_best:
            tails = replace(tails, long_best=long, long_stale=0)
        else:
            tails = replace(tails, long_stale=tails.long_stale + 1)
        self.tails = tails

    def _switch(self, xe: float) -> None:
        tails = Tails(self._short.count, long_best=xe)
        self._begin(self._short.tensors(), self._short.count, tails)

    def _forget(self) -> None:
        tails = replace(self.tails, frozen=self.count, short_best=None, short_stale=0)
        self._begin(self.mean("long"), self.count, tails)

    def _begin(self, frozen: Mapping[str, Tensor], steps: int, tails: Tails) -> None:
        """Starts an empty short mean after a frozen one over some steps."""
        self._frozen = {name: mean.clone() for name, mean in frozen.items()}
        self._short.count = 0
        self.tails = replace(tails, frozen=steps)

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """Groups of tensors for `restore`; "average" is the long mean."""
        groups = {"average": self.tensors()}
        if self.tails.frozen and self._short.count:
            groups |= {"short": self._short.tensors(), "frozen": dict(self._frozen)}
        return groups

    @torch.no_grad()
    def restore(self, groups: Mapping[str, Mapping[str, Tensor]], count: int, tails: Tails) -> None:
        """Continues from what `saved` gave, with a long mean over `count` steps."""
        self.tails, short = tails, count - tails.frozen
        self._short.restore(groups.get("short") or groups["average"], short)
        self._frozen = {}
        if tails.frozen:
            frozen = groups.get("frozen") or groups["average"]
            self._frozen = {
                name: p.detach().clone().copy_(frozen[name]) for name, p in self._parameters.items()
            }
