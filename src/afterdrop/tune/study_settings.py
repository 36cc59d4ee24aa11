"""What a study is: everything that the worth of its trials depends on. Kept in its storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from afterdrop import recipes
from afterdrop.train import TrainConfig, shorten
from afterdrop.train.checks import check_count, check_number, check_one_of
from afterdrop.tune.checks import TuneError
from afterdrop.tune.search_space import Axis, Space, apply_point, published_space
from afterdrop.tune.tuning_objective import Objective

Sampler = Literal["gp", "random"]
VERSION = 2
STUDY_FILE = "study.json"  # what came of a study, in its folder


@dataclass(frozen=True)
class TuneSettings:
    """A study's settings; how many trials, workers and devices may differ from call to call.

    Attributes:
        recipe: The name of what is tuned.
        config: The configuration that each trial changes.
        space: What is changed, and within which ranges.
        objective: What is minimised.
        sampler: `"gp"`, the Gaussian-process bandit, or `"random"`.
        seed: Of the points.
        own_first: Whether the first trial is the configuration as it is, where the space has it.
        prune: Whether hopeless trials are stopped early.
        minutes: Time limit of a trial, which then counts with what it has reached; None is none.

    Example:
        >>> settings = plan_study("digits-mlp", intervals=4)
        >>> TuneSettings.from_dict(settings.to_dict()) == settings
        True
    """

    recipe: str
    config: TrainConfig
    space: Space
    objective: Objective = field(default_factory=Objective)
    sampler: Sampler = "gp"
    seed: int = 0
    own_first: bool = True
    prune: bool = True
    minutes: float | None = None

    def __post_init__(self) -> None:
        check_one_of("sampler", self.sampler, ("gp", "random"))
        check_count("seed", self.seed, least=0)
        if self.minutes is not None:
            check_number("minutes_per_trial", self.minutes, above=0)
        for unit in (0.0, 1.0):  # both ends of every range must be settings that a model can have
            apply_point(self.config, self.space.point([unit] * len(self.space)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-friendly: what `from_dict` reads."""
        return {"version": VERSION, **asdict(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TuneSettings:
        """From what `to_dict` gave.

        Raises:
            TuneError: If another version of afterdrop wrote it.
        """
        if content.get("version") != VERSION:
            raise TuneError(
                f"the study has schema version {content.get('version')!r}, this afterdrop reads "
                f"{VERSION}; start a new study or install the matching afterdrop"
            )
        made = {name: value for name, value in content.items() if name != "version"}
        made["config"] = TrainConfig.from_dict(made["config"])
        made["space"] = Space(tuple(Axis(**axis) for axis in made["space"]["axes"]))
        made["objective"] = Objective(**made["objective"])
        return cls(**made)


def plan_study(
    recipe: str,
    *,
    changes: Mapping[str, Any] | None = None,
    intervals: int | None = None,
    budget: int | None = None,
    ranges: Iterable[Axis] = (),
    fixed: Iterable[str] = (),
    objective: Objective | None = None,
    **others: Any,
) -> TuneSettings:
    """The study of a recipe.

    Args:
        recipe: Name of a recipe, or the path of a .toml file.
        changes: Settings to change, by dotted names.
        intervals: Shorten the schedule to so many intervals.
        budget: Hold the number of parameters to this, instead of the recipe's sizes.
        ranges: Axes to change or add.
        fixed: Axes to leave out.
        objective: What to minimise; by default the deterministic member at its optimal T.
        others: `sampler`, `seed`, `own_first`, `prune`, `minutes` of `TuneSettings`.

    Raises:
        ConfigError: If a setting is unknown or outside its domain.

    Example:
        >>> len(plan_study("pydoc-small", budget=500_000).space)
        7
    """
    objective = objective or Objective()
    config = recipes.load(recipe).config.override(changes or {})
    if budget is not None:
        config = with_budget(config, budget)
    if intervals is not None:
        config = shorten(config, intervals)
    # The best checkpoint is the one that the objective likes best.
    config = config.override({"validation.criterion": objective.temperature})
    space = published_space(config).with_axes(ranges, fixed)
    name = recipes.load(recipe).name
    return TuneSettings(name, config, space, objective, **others)


def with_budget(config: TrainConfig, budget: int) -> TrainConfig:
    """A language model with as many layers, whose sizes follow from a number of parameters.

    Example:
        >>> config = with_budget(recipes.load("pydoc-small").config, 500_000)
        >>> config.model.settings["layers"]
        2
    """
    changes: dict[str, Any] = {"model.budget": budget}
    sizes = config.model.settings.get("hidden_sizes")
    if sizes is not None:
        changes |= {"model.hidden_sizes": None, "model.embedding_size": None}
        changes |= {"model.layers": len(sizes), "model.embedding_ratio": 1.0}
    return config.override(changes)
