"""The sections of a training configuration: plain values, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afterdrop.data.stripes import JITTER
from afterdrop.train.checks import ConfigError, check_count, check_number, check_one_of

OptimiserName = Literal["adam-tf", "adam"]
Criterion = Literal["optimal", "plain"]
AveragingKind = Literal["tail", "two-tailed"]
# The penalties of the objective, each with a coefficient NAME_penalty.
PENALTIES = ("fraternal", "expectation_linear", "activation", "temporal_activation")


@dataclass(frozen=True)
class DataSection:
    """The data set: the arguments of `afterdrop.data.load`.

    Attributes:
        name: A named set, a built-in one, or the path of a folder of text.
        level: `word`, `char` or `byte`, if the set has a choice.
        min_count: Rarer tokens become `<unk>`, if the set has a choice.
    """

    name: str
    level: str | None = None
    min_count: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(
                f"data.name is {self.name!r}; it takes the name of a set, such as 'ptb' or "
                "'builtin:pydoc', or the path of a folder. Give one."
            )
        if self.level is not None:
            check_one_of("data.level", self.level, ("word", "char", "byte"))
        if self.min_count is not None:
            check_count("data.min_count", self.min_count)


@dataclass(frozen=True)
class ObjectiveSection:
    """The loss and the batch of a step.

    Attributes:
        batch_size: B, the stripes of a text, or images.
        window: Tokens per stripe and step; None for images.
        l2_penalty: Factor of ½‖Θ‖², on the scale of the loss (summed over time, averaged over the
            batch).
        samples: Mask samples per row, averaged in the loss, each with its own carried state; 1 in
            the paper. Row masks of the embedding, one for the whole batch, are shared by all
            samples.
        alpha: Power of the mean over several samples.
        state_reset: Probability that the carried state of a stripe is set to zero before a window.
        jitter: The largest number of lines by which the start of a stripe is moved.
        fraternal_penalty: κ of fraternal dropout: the loss is the mean of two masks' losses, plus
            κ times the mean squared difference of their logits; published 0.1 and 0.15. Means of
            penalties are over time, rows and classes (or units), with coefficients on the scale of
            a loss per target (see `penalties`).
        expectation_linear_penalty: κ of expectation-linear dropout, times the mean squared
            difference between the logits with and without dropout; published 0.25.
        activation_penalty: α of activation regularisation, times the mean square of the stack's
            dropped output; published 2.
        temporal_activation_penalty: β of temporal activation regularisation, times the mean
            squared change of the stack's output from step to step; published 1.
    """

    batch_size: int
    window: int | None = None
    l2_penalty: float = 0.0
    samples: int = 1
    alpha: float = 1.0
    state_reset: float = 0.0
    jitter: int = JITTER
    fraternal_penalty: float = 0.0
    expectation_linear_penalty: float = 0.0
    activation_penalty: float = 0.0
    temporal_activation_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_count("objective.batch_size", self.batch_size)
        if self.window is not None:
            check_count("objective.window", self.window)
        check_number("objective.l2_penalty", self.l2_penalty, least=0)
        check_count("objective.samples", self.samples)
        check_number("objective.alpha", self.alpha, least=0, most=1)
        check_number("objective.state_reset", self.state_reset, least=0, most=1)
        check_count("objective.jitter", self.jitter, least=0)
        for name in PENALTIES:
            check_number(f"objective.{name}_penalty", getattr(self, f"{name}_penalty"), least=0)
        self._check_penalties()

    def _check_penalties(self) -> None:
        """Refuses penalties that contradict each other or the rest of the objective."""
        if self.fraternal_penalty > 0 and self.samples > 1:
            raise ConfigError(
                f"objective.fraternal_penalty is {self.fraternal_penalty!r} with "
                f"objective.samples={self.samples}; fraternal dropout averages the losses of two "
                "masks by itself. Set objective.samples to 1, or leave the penalty out."
            )
        if self.fraternal_penalty > 0 and self.expectation_linear_penalty > 0:
            raise ConfigError(
                f"objective.fraternal_penalty is {self.fraternal_penalty!r} and "
                f"objective.expectation_linear_penalty is {self.expectation_linear_penalty!r}; a "
                "pass is compared with a second mask or with none. Set one of the two to 0."
            )
        if self.temporal_activation_penalty > 0 and self.window == 1:
            raise ConfigError(
                f"objective.temporal_activation_penalty is {self.temporal_activation_penalty!r} "
                "with objective.window=1; it compares neighbouring steps of a window. Set "
                "objective.window to 2 or more, or leave the penalty out."
            )


@dataclass(frozen=True)
class OptimiserSection:
    """The optimiser.

    Attributes:
        name: `"adam-tf"`, Adam without momentum as lamb has it (see `optimiser`), or `"adam"`,
            torch's own.
        learning_rate: The learning rate before any drop.
        beta1: Momentum; 0 for `"adam-tf"`.
        beta2: Decay of the squared gradients' mean.
        epsilon: Added to the root of that mean.
        max_norm: Global norm to which gradients, with the L2 term, are clipped; None disables it.
    """

    learning_rate: float
    name: OptimiserName = "adam-tf"
    beta1: float = 0.0
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_norm: float | None = None

    def __post_init__(self) -> None:
        check_one_of("optimiser.name", self.name, ("adam-tf", "adam"))
        check_number("optimiser.learning_rate", self.learning_rate, above=0)
        for name in ("beta1", "beta2"):
            check_number(f"optimiser.{name}", getattr(self, name), least=0, most=1)
            if getattr(self, name) == 1:
                raise ConfigError(f"optimiser.{name} is 1; it must be below 1. Try 0.999.")
        check_number("optimiser.epsilon", self.epsilon, above=0)
        if self.max_norm is not None:
            check_number("optimiser.max_norm", self.max_norm, above=0)
        if self.name == "adam-tf" and self.beta1 != 0:
            raise ConfigError(
                f"optimiser.beta1 is {self.beta1!r}; 'adam-tf' has no momentum. "
                "Set it to 0, or optimiser.name to 'adam'."
            )


@dataclass(frozen=True)
class ScheduleSection:
    """Validation intervals, learning-rate drops and early stopping (see `schedule`).

    None disables a rule.

    Attributes:
        steps_per_interval: Steps between two validations.
        intervals: Maximum number of validation intervals.
        drop_patience: Drop the learning rate after more than this number of intervals without a
            new best.
        drop_latest: Drop after this interval at the latest, if there was no drop before.
        drop_factor: A drop multiplies the learning rate by it.
        stop_patience: Stop after more than this number of intervals without a new best.
        stop_rampup: Intervals over which that patience grows from 1.
        stop_targets: XE that must be within reach before the first drop, after it, after the
            second, and so on.
        stop_slowest: Smallest improvement per interval, averaged over the patience.
    """

    steps_per_interval: int
    intervals: int
    drop_patience: int | None = None
    drop_latest: int | None = None
    drop_factor: float = 0.1
    stop_patience: int | None = None
    stop_rampup: int = 0
    stop_targets: tuple[float, ...] = ()
    stop_slowest: float = 0.0

    def __post_init__(self) -> None:
        check_count("schedule.steps_per_interval", self.steps_per_interval)
        check_count("schedule.intervals", self.intervals)
        for name in ("drop_patience", "drop_latest", "stop_patience"):
            if getattr(self, name) is not None:
                check_count(f"schedule.{name}", getattr(self, name))
        check_number("schedule.drop_factor", self.drop_factor, above=0, most=1)
        check_count("schedule.stop_rampup", self.stop_rampup, least=0)
        check_number("schedule.stop_slowest", self.stop_slowest, least=0)
        if not isinstance(self.stop_targets, list | tuple):
            raise ConfigError(
                f"schedule.stop_targets is {self.stop_targets!r}; it takes a list of XE in nats. "
                "Give a list such as [4.4, 4.2], or [] for none."
            )
        # JSON and TOML give lists; a tuple keeps the configuration hashable.
        object.__setattr__(self, "stop_targets", tuple(self.stop_targets))
        for index, target in enumerate(self.stop_targets):
            check_number(f"schedule.stop_targets[{index}]", target, above=0)
        if self.stop_patience is None and (self.stop_targets or self.stop_slowest):
            raise ConfigError(
                "schedule.stop_patience is None; stop_targets and stop_slowest look back over "
                "that number of intervals. Give it, or leave them out."
            )


@dataclass(frozen=True)
class AveragingSection:
    """Which running mean of the weights is validated, and when it starts.

    Attributes:
        kind: `"tail"` for one mean, which never starts if `patience` and `latest` are None;
            `"two-tailed"` for two from the first step on, one of which replaces the other
            (`train.two_tailed`). Each interval is then validated up to three times.
        patience: The mean starts after this number of intervals without a new best. Two-tailed: a
            mean is given up after this number of intervals without improvement; None for never.
        latest: The mean starts after this interval at the latest; not for two-tailed averaging.
    """

    kind: AveragingKind = "tail"
    patience: int | None = None
    latest: int | None = None

    def __post_init__(self) -> None:
        check_one_of("averaging.kind", self.kind, ("tail", "two-tailed"))
        for name in ("patience", "latest"):
            if getattr(self, name) is not None:
                check_count(f"averaging.{name}", getattr(self, name), least=0)
        if self.kind == "two-tailed" and self.latest is not None:
            raise ConfigError(
                f"averaging.latest is {self.latest}; two-tailed averaging starts with the first "
                "step. Leave it out, or set averaging.kind to 'tail'."
            )
        if self.kind == "two-tailed" and self.patience == 0:
            raise ConfigError(
                "averaging.patience is 0; two-tailed averaging would give up both means at once. "
                "Give at least 1, or none to keep them."
            )


@dataclass(frozen=True)
class ValidationSection:
    """The deterministic validation after each interval.

    Attributes:
        stripes: Stripes of the validation text, of which one is the exact stream; or images per
            batch.
        window: Tokens per window; None is the training window. It changes nothing but the speed.
        max_targets: Validate on about this number of targets; None is all.
        criterion: The XE that is compared: at the `"optimal"` temperature, or at 1 (`"plain"`).
    """

    stripes: int = 32
    window: int | None = None
    max_targets: int | None = None
    criterion: Criterion = "optimal"

    def __post_init__(self) -> None:
        check_count("validation.stripes", self.stripes)
        for name in ("window", "max_targets"):
            if getattr(self, name) is not None:
                check_count(f"validation.{name}", getattr(self, name))
        check_one_of("validation.criterion", self.criterion, ("optimal", "plain"))
