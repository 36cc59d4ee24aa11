"""The settings of a study: everything that the values of its trials depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypedDict

from afterdrop import recipes
from afterdrop.train import TrainConfig, shorten
from afterdrop.train.checks import check_count, check_number, check_one_of
from afterdrop.tune.checks import TuneError
from afterdrop.tune.search_space import Axis, Space, apply_point, published_space
from afterdrop.tune.tuning_objective import Objective
from afterdrop.typed_records import read_record

Sampler = Literal["gp", "random"]
VERSION = 2
STUDY_FILE = "study.json"  # the result of a study, in its folder


@dataclass(frozen=True)
class TuneSettings:
    """The settings of a study, which its storage keeps.

    The numbers of trials, workers and devices are not part of them and may differ between calls.

    Attributes:
        recipe: The name of the recipe.
        config: The configuration that each trial changes.
        space: The settings that are searched, with their ranges.
        objective: The objective to minimise.
        sampler: `"gp"`, the Gaussian-process bandit, or `"random"`.
        seed: Seed of the proposed points.
        own_first: Whether the first trial is the unmodified configuration, if it lies in the space.
        prune: Whether unpromising trials are stopped early.
        minutes: Time limit per trial, after which the best value so far counts; None for no limit.

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
        for unit in (0.0, 1.0):  # both ends of every range must be valid settings
            apply_point(self.config, self.space.point([unit] * len(self.space)))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-compatible dictionary that `from_dict` reads."""
        return {"version": VERSION, **asdict(self), "config": self.config.to_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TuneSettings:
        """Builds settings from a dictionary that `to_dict` returned.

        Raises:
            TuneError: If another version of afterdrop wrote it, or it is damaged.
        """
        found = content.get("version") if isinstance(content, Mapping) else None
        if found != VERSION:
            raise TuneError(
                f"the study has schema version {found!r:.20}, this afterdrop reads {VERSION}; "
                "start a new study or install the matching afterdrop"
            )
        try:
            made: dict[str, Any] = {**read_record(_SettingsRecord, content)}
            made["config"] = TrainConfig.from_dict(made["config"])
            return cls(**{field.name: made[field.name] for field in fields(cls)})
        except ValueError as error:
            raise TuneError(
                f"the settings of the study are damaged ({error}); restore them, or start a new "
                "study in another folder"
            ) from error


class _SettingsRecord(TypedDict):
    """What `TuneSettings.to_dict` gives, beside the version."""

    recipe: str
    config: dict[str, Any]
    space: Space
    objective: Objective
    sampler: Sampler
    seed: int
    own_first: bool
    prune: bool
    minutes: float | None


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
    """The settings of a study that tunes a recipe.

    Args:
        recipe: Name of a recipe, or the path of a .toml file.
        changes: Settings to change in every trial, by dotted name.
        intervals: Number of validation intervals to shorten the schedule to.
        budget: Number of parameters, from which the sizes of a language model then follow.
        ranges: Axes to replace or add.
        fixed: Names of axes to remove.
        objective: The objective to minimise; by default the XE of DET at its optimal temperature.
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
    # The best checkpoint is selected by the same criterion as the best trial.
    config = config.override({"validation.criterion": objective.temperature})
    space = published_space(config).with_axes(ranges, fixed)
    name = recipes.load(recipe).name
    return TuneSettings(name, config, space, objective, **others)


def with_budget(config: TrainConfig, budget: int) -> TrainConfig:
    """The same language model with its sizes derived from a parameter budget.

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
