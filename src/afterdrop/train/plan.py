"""A model before its data are known: everything but the vocabulary or the size of images.

The settings are the fields of `LanguageModelConfig` or `ClassifierConfig`. A language model may
have a parameter budget (`budget`, `layers`, `embedding_ratio`) instead of sizes: its hidden size is
then the largest that fits the budget, which depends on the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from afterdrop.models import ClassifierConfig, LanguageModelConfig, sizes_within
from afterdrop.train.checks import ConfigError, check_count, check_known, check_one_of

Kind = Literal["language_model", "classifier"]
KINDS: tuple[Kind, ...] = ("language_model", "classifier")
BUDGET = ("budget", "layers", "embedding_ratio")


def known_settings(kind: Kind) -> frozenset[str]:
    """The names of the settings that a plan of this kind may have.

    Example:
        >>> sorted(known_settings("classifier"))
        ['hidden_dropout', 'hidden_sizes', 'input_dropout']
    """
    if kind == "classifier":
        return frozenset(f.name for f in fields(ClassifierConfig)) - {"input_size", "classes"}
    return frozenset(f.name for f in fields(LanguageModelConfig)) - {"vocabulary"} | {*BUDGET}


@dataclass(frozen=True)
class ModelPlan:
    """The model of a training run.

    Attributes:
        kind: `"language_model"` or `"classifier"`.
        settings: Fields of its configuration; for a language model either `hidden_sizes` (and
            perhaps `embedding_size`), or `budget` with `layers` (1) and `embedding_ratio` (1.0).

    Example:
        >>> plan = ModelPlan("language_model", {"budget": 24_000_000, "layers": 4})
        >>> plan.language_model(vocabulary=10_001).hidden_sizes
        (723, 723, 723, 723)
    """

    kind: Kind = "language_model"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_one_of("model.kind", self.kind, KINDS)
        check_known("model", self.settings, known_settings(self.kind))
        # The model's own checks, with placeholders for the sizes that depend on the data.
        if self.kind == "classifier":
            self.classifier(1, 1)
        else:
            self._check_sizes()
            self.language_model(1)

    def language_model(self, vocabulary: int) -> LanguageModelConfig:
        """The configuration for a vocabulary of this size."""
        if "budget" not in self.settings:
            return LanguageModelConfig(vocabulary, **self.settings)
        rest = {name: value for name, value in self.settings.items() if name not in BUDGET}
        layers = self.settings.get("layers", 1)
        sizes = sizes_within(
            self.settings["budget"],
            vocabulary,
            layers,
            embedding_ratio=self.settings.get("embedding_ratio", 1.0),
            tied=rest.get("tied", True),
            layer_norm=rest.get("layer_norm", False),
            tied_gates=rest.get("input_gate") == "tied",
            softmax_components=rest.get("softmax_components", 1),
            mogrifier_rounds=rest.get("mogrifier_rounds", 0),
            mogrifier_rank=rest.get("mogrifier_rank", 0),
        )
        return LanguageModelConfig(vocabulary, (sizes.hidden,) * layers, sizes.embedding, **rest)

    def classifier(self, input_size: int, classes: int) -> ClassifierConfig:
        """The configuration for images of this size and number of classes."""
        return ClassifierConfig(input_size, classes, **self.settings)

    def _check_sizes(self) -> None:
        given = set(self.settings)
        if ("budget" in given) == ("hidden_sizes" in given):
            raise ConfigError(
                "model needs either hidden_sizes or budget and not both; it has "
                f"{', '.join(sorted(given & {'budget', 'hidden_sizes'})) or 'neither'}. "
                "Give hidden_sizes such as [650, 650], or budget, the number of parameters."
            )
        against = {"embedding_size"} if "budget" in given else {"layers", "embedding_ratio"}
        for name in sorted(given & against):
            raise ConfigError(
                f"model.{name} is {self.settings[name]!r}; it cannot be combined with "
                f"{'budget' if 'budget' in given else 'hidden_sizes'}. Leave one of them out."
            )
        if "budget" in given:
            check_count("model.budget", self.settings["budget"])
            check_count("model.layers", self.settings.get("layers", 1))
