"""The configuration of a training run, which recipes and `config.json` contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from afterdrop.train.checks import ConfigError, check_count, check_integers, check_known
from afterdrop.train.plan import ModelPlan, known_settings
from afterdrop.train.sections import (
    AveragingSection,
    DataSection,
    ObjectiveSection,
    OptimiserSection,
    ScheduleSection,
    ValidationSection,
)

SECTIONS: dict[str, Any] = {
    "data": DataSection,
    "objective": ObjectiveSection,
    "optimiser": OptimiserSection,
    "schedule": ScheduleSection,
    "averaging": AveragingSection,
    "validation": ValidationSection,
}


@dataclass(frozen=True)
class TrainConfig:
    """Everything that determines a run; on a CPU, equal configurations give equal runs.

    Attributes:
        data: The data set.
        model: The model.
        objective: The loss and the batches.
        optimiser: The optimiser.
        schedule: Validation intervals, learning-rate drops, early stopping.
        averaging: When weights are averaged.
        validation: How the model is validated after each interval.
        seed: Seed of the initial weights, masks, state resets and the order of the data.

    Example:
        >>> config = TrainConfig.from_dict({
        ...     "data": {"name": "builtin:pydoc"},
        ...     "model": {"hidden_sizes": [64], "input_dropout": 0.3},
        ...     "objective": {"batch_size": 16, "window": 20},
        ...     "optimiser": {"learning_rate": 0.004},
        ...     "schedule": {"steps_per_interval": 100, "intervals": 5},
        ... })
        >>> config.override({"optimiser.learning_rate": 0.001}).optimiser.learning_rate
        0.001
        >>> TrainConfig.from_dict(config.to_dict()) == config
        True
    """

    data: DataSection
    model: ModelPlan
    objective: ObjectiveSection
    optimiser: OptimiserSection
    schedule: ScheduleSection
    averaging: AveragingSection = field(default_factory=AveragingSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    seed: int = 1

    def __post_init__(self) -> None:
        check_count("seed", self.seed, least=0)
        text = self.model.kind == "language_model"
        if text and self.objective.window is None:
            raise ConfigError(
                "objective.window is None; a language model reads windows of a text. "
                "Give the number of tokens, such as 35."
            )
        for section, name, default in (
            ("objective", "window", None),
            ("objective", "state_reset", 0.0),
            ("validation", "window", None),
        ):
            value = getattr(getattr(self, section), name)
            if not text and value != default:
                raise ConfigError(
                    f"{section}.{name} is {value!r}; a classifier has no windows and no "
                    f"carried state. Leave it out, or set model.kind to 'language_model'."
                )
        for name in ("activation_penalty", "temporal_activation_penalty"):
            if not text and (value := getattr(self.objective, name)) > 0:
                raise ConfigError(
                    f"objective.{name} is {value!r}; it penalises the output of a recurrent stack, "
                    "which a classifier does not have. Leave it out; objective.fraternal_penalty "
                    "and objective.expectation_linear_penalty compare logits and work here."
                )
        if text and (components := self.model.settings.get("softmax_components", 1)) != 1:
            for name in ("fraternal_penalty", "expectation_linear_penalty"):
                if (value := getattr(self.objective, name)) > 0:
                    raise ConfigError(
                        f"objective.{name} is {value!r} with model.softmax_components="
                        f"{components}; it compares logits, which a mixture of softmaxes does not "
                        "have. Leave one of them out."
                    )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> TrainConfig:
        """Builds a configuration from nested plain values, as in TOML and JSON.

        Raises:
            ConfigError: If a setting is unknown, missing or outside its domain.
        """
        check_known("", content, ("model", *SECTIONS, "seed"))
        check_integers("", content)
        made: dict[str, Any] = {"seed": content.get("seed", 1)}
        for name, section in SECTIONS.items():
            made[name] = _section(name, section, _table(name, content.get(name, {})))
        model = dict(_table("model", content.get("model", {})))
        made["model"] = ModelPlan(model.pop("kind", "language_model"), model)
        return cls(**made)

    def to_dict(self) -> dict[str, Any]:
        """Nested, JSON-serialisable values, which `from_dict` reads."""
        content: dict[str, Any] = {
            "data": {},
            "model": {
                "kind": self.model.kind,
                **{name: _plain(value) for name, value in self.model.settings.items()},
            },
        }
        for name in SECTIONS:
            section = getattr(self, name)
            content[name] = {f.name: _plain(getattr(section, f.name)) for f in fields(section)}
        content["seed"] = self.seed
        return content

    def override(self, changes: Mapping[str, Any]) -> TrainConfig:
        """A configuration with some settings changed, given by their dotted names.

        None removes a model setting, so that `{"model.budget": None, "model.hidden_sizes": [650]}`
        replaces one by the other.

        Raises:
            ConfigError: If a name is unknown; the message suggests the nearest one.
        """
        content = self.to_dict()
        for dotted, value in changes.items():
            section, _, name = dotted.rpartition(".")
            check_known("", [dotted], _dotted_names(self.model))
            place = content[section] if section else content
            if section == "model" and value is None:
                place.pop(name, None)
            else:
                place[name] = value
        return TrainConfig.from_dict(content)


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Each setting that differs, as `name: old → new`.

    Example:
        >>> from afterdrop import recipes
        >>> one = recipes.load("digits-mlp").config
        >>> differences(one, one.override({"seed": 7}))
        ['seed: 1 → 7']
    """
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    return [
        f"{name}: {before.get(name)!r} → {after.get(name)!r}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def _section(name: str, section: Any, table: Mapping[str, Any]) -> Any:
    check_known(name, table, [f.name for f in fields(section)])
    for f in fields(section):
        if f.default is MISSING and f.name not in table:
            raise ConfigError(f"{name}.{f.name} is missing; it has no default. Give it.")
    return section(**table)


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}; it must be a table of settings. Write [{name}].")
    return value


def _dotted_names(model: ModelPlan) -> list[str]:
    names = [f"{name}.{f.name}" for name, section in SECTIONS.items() for f in fields(section)]
    return [*names, "model.kind", *(f"model.{n}" for n in known_settings(model.kind)), "seed"]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in content.items():
        inner = _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else None
        flat.update({f"{prefix}{name}": value} if inner is None else inner)
    return flat
