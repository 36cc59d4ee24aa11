"""Search spaces: ranges of settings of a configuration, mapped to the unit cube.

The published ranges are those of Melis et al., Mogrifier LSTM (appendix on hyperparameters), which
follows the setup of the dropout paper. The upper end of the learning rate is .01 instead of .004,
because two published optima lie above .004.

    learning rate   [.001, .01] log       input dropout        [0, .9]    on enwik8 [0, .2]
    L2 penalty      [5e-6, 1e-3] log      inter-layer dropout  [0, .95]             [0, .2]
    embedding ratio [0, 2]                state dropout        [0, .8]              [0, .25]
                                          output dropout       [0, .95]             [0, .25]
                        projection dropout of a mixture of softmaxes: as output dropout

    Mogrifier rounds, rank [0, 6], [-20, 100] if the recipe has rounds; rounded to whole numbers

A rank below 1 means full matrices, and an embedding ratio of at least 1 no projection. The ratio is
tuned only if the recipe states a parameter budget: the hidden size is then solved for, so that
every trial has the same number of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from afterdrop.train import ConfigError, TrainConfig

Point = dict[str, float]

_LEAST_RATIO = 1e-3  # the budget solver needs a ratio above 0; an embedding has at least one unit
_RATIO = "model.embedding_ratio"
_ROUNDS, _RANK = "model.mogrifier_rounds", "model.mogrifier_rank"


@dataclass(frozen=True)
class Axis:
    """The range of one setting.

    Attributes:
        name: The setting's dotted name, as in a recipe.
        low: The lowest value.
        high: The highest value.
        log: Whether the range is searched on a log scale.

    Example:
        >>> axis = Axis("optimiser.learning_rate", 1e-3, 1e-1, log=True)
        >>> round(axis.at(0.5), 6), round(axis.unit(0.01), 6)
        (0.01, 0.5)
    """

    name: str
    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(
                f"the range of {self.name} is {self.low:g} to {self.high:g}; give a lower and a "
                "higher finite number"
            )
        if self.log and self.low <= 0:
            raise ConfigError(
                f"the range of {self.name} is {self.low:g} to {self.high:g} on a log scale, which "
                "must start above 0; raise its lower end, or leave out log"
            )

    @classmethod
    def parse(cls, text: str) -> Axis:
        """Parses an axis from `name=low:high` or `name=low:high:log`.

        Example:
            >>> Axis.parse("model.input_dropout=0:0.9")
            Axis(name='model.input_dropout', low=0.0, high=0.9, log=False)
        """
        name, _, ends = text.partition("=")
        parts = ends.split(":")
        try:
            if len(parts) not in (2, 3) or parts[2:] not in ([], ["log"]):
                raise ValueError(ends)
            return cls(name, float(parts[0]), float(parts[1]), len(parts) == 3)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the range {text!r} is not NAME=LOW:HIGH or NAME=LOW:HIGH:log; write it as in "
                "optimiser.learning_rate=0.001:0.01:log"
            ) from None

    def at(self, unit: float) -> float:
        """The value at a fraction of the range, between 0 and 1."""
        return min(max(self.place(unit), self.low), self.high)

    def place(self, unit: float) -> float:
        """Like `at`, but not limited to the range."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        value = low + unit * (high - low)
        return math.exp(value) if self.log else value

    def unit(self, value: float) -> float:
        """The inverse of `at`."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        return (self._scaled(value) - low) / (high - low)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value


@dataclass(frozen=True)
class Space:
    """Several axes; a point has a value for each axis.

    Example:
        >>> Space((Axis("model.input_dropout", 0, 0.9),)).point([0.5])
        {'model.input_dropout': 0.45}
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        if not self.axes:
            raise ConfigError("the search space is empty; give at least one range")

    def __iter__(self) -> Iterator[Axis]:
        return iter(self.axes)

    def __len__(self) -> int:
        return len(self.axes)

    def point(self, units: Iterable[float]) -> Point:
        """The point at the given coordinates of the unit cube."""
        return {axis.name: axis.at(unit) for axis, unit in zip(self.axes, units, strict=True)}

    def with_axes(self, changed: Iterable[Axis], without: Iterable[str] = ()) -> Space:
        """A space with axes replaced, added or removed.

        Raises:
            ConfigError: If an axis to remove does not exist.
        """
        axes = {axis.name: axis for axis in (*self.axes, *changed)}
        for name in without:
            if name not in axes:
                raise ConfigError(
                    f"{name!r} is not searched and cannot be fixed; the space has the axes "
                    f"{', '.join(axes)}"
                )
            del axes[name]
        return Space(tuple(axes.values()))


def published_space(config: TrainConfig) -> Space:
    """The default space of a configuration: the published one, or ours for classifiers.

    Example:
        >>> from afterdrop import recipes
        >>> [axis.name for axis in published_space(recipes.load("ptb-10m").config)][2:]
        ['model.input_dropout', 'model.state_dropout', 'model.output_dropout', \
'model.embedding_ratio']
    """
    l2 = Axis("objective.l2_penalty", 5e-6, 1e-3, log=True)
    if config.model.kind == "classifier":
        # The paper gives no ranges for MNIST: usual learning rates of Adam, and dropout up to 0.9.
        rates = [Axis("model.input_dropout", 0, 0.5)]
        if config.model.classifier(1, 2).hidden_sizes:
            rates.append(Axis("model.hidden_dropout", 0, 0.9))
        return Space((Axis("optimiser.learning_rate", 1e-4, 1e-2, log=True), l2, *rates))
    settings, enwik8 = config.model.settings, config.data.name == "enwik8"
    layers = settings.get("layers", 1) if "budget" in settings else len(settings["hidden_sizes"])
    highs = {"input": 0.9, "inter_layer": 0.95, "state": 0.8, "output": 0.95}
    if enwik8:
        highs = {"input": 0.2, "inter_layer": 0.2, "state": 0.25, "output": 0.25}
    if layers == 1:
        del highs["inter_layer"]
    if settings.get("softmax_components", 1) > 1:
        highs["projection"] = highs["output"]  # of a mixture; lamb tunes it there, too
    axes = [Axis("optimiser.learning_rate", 1e-3, 1e-2, log=True), l2]
    axes += [Axis(f"model.{site}_dropout", 0, high) for site, high in highs.items()]
    if "budget" in settings and not enwik8:
        axes.append(Axis(_RATIO, 0, 2))
    if settings.get("mogrifier_rounds", 0):
        axes += [Axis(_ROUNDS, 0, 6), Axis(_RANK, -20, 100)]
    return Space(tuple(axes))


def apply_point(config: TrainConfig, point: Mapping[str, float]) -> TrainConfig:
    """The configuration at a point of a space.

    Example:
        >>> from afterdrop import recipes
        >>> config = apply_point(recipes.load("ptb-10m").config, {"model.embedding_ratio": 1.7})
        >>> config.model.settings["embedding_ratio"]
        1.0
    """
    changes = dict(point)
    for name in (_ROUNDS, _RANK):
        if name in changes:
            changes[name] = max(0, round(changes[name]))
    if _RATIO in changes:
        changes[_RATIO] = min(max(changes[_RATIO], _LEAST_RATIO), 1.0)
    return config.override(changes)


def own_point(config: TrainConfig, space: Space) -> Point | None:
    """The point of the unmodified configuration; None if it lies outside the space.

    Example:
        >>> from afterdrop import recipes
        >>> config = recipes.load("digits-mlp").config
        >>> own_point(config, published_space(config))["model.hidden_dropout"]
        0.5
    """
    content = config.to_dict()
    point: Point = {}
    for axis in space:
        section, _, name = axis.name.partition(".")
        value: Any = content.get(section, {}).get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not axis.low <= value <= axis.high:
            return None
        point[axis.name] = float(value)
    return point
