"""Members of the extended dropout family, and grids of them.

A member is a way to predict from one set of weights trained with dropout (Melis et al., 2018):

    log M_α(c) = (1/α) log mean_k exp(α log p_k(c))     p_k: sample k, rates × `multiplier`
    log p(c)   = log M_α(c)/T − log Σ_c' M_α(c')^(1/T)  with temper="mean"

Conventions of the whole package: rates are probabilities of dropping, the temperature divides
log-probabilities (T > 1 smooths), cross entropy (`xe`) is in nats.
"""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from afterdrop.errors import MemberError

Temper = Literal["mean", "sample", "component"]
TEMPERS: tuple[Temper, ...] = ("mean", "sample", "component")

GEOMETRIC = 1e-12  # smaller powers differ from the geometric mean by less than rounding


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or math.isnan(value):
        raise MemberError(f"{name}={value!r} must be a number")
    return float(value)


def check_alpha(value: Any, *, bounded: bool = True) -> float:
    """Returns a valid power of the mean, or raises `MemberError`.

    Outside [0, 1] the dropout objective is not a lower bound: α < 0 reverses the Jensen gap, and
    α > 1 makes the normaliser exceed 1. `bounded=False` admits any finite power.
    """
    alpha = _number("alpha", value)
    if bounded and not 0 <= alpha <= 1:
        raise MemberError(
            f"alpha={alpha:g} lies outside [0, 1], where dropout training bounds the model; "
            "use 0 (geometric) to 1 (arithmetic)"
        )
    if not math.isfinite(alpha):
        raise MemberError(f"alpha={alpha} must be finite")
    return 0.0 if abs(alpha) < GEOMETRIC else alpha


def check_multiplier(value: Any) -> float:
    """Returns a valid multiplier of the dropout rates, or raises `MemberError`."""
    multiplier = _number("multiplier", value)
    if not 0 <= multiplier <= 1:
        raise MemberError(
            f"multiplier={multiplier:g} lies outside [0, 1]; it multiplies every dropout rate at "
            "evaluation: 0 is deterministic, 1 keeps the rates of training"
        )
    return multiplier


def check_temperature(value: Any) -> float:
    """Returns a valid temperature, or raises `MemberError`."""
    temperature = _number("temperature", value)
    if not 0 < temperature < math.inf:
        raise MemberError(
            f"temperature={temperature:g} must be positive and finite; it divides "
            "log-probabilities: 1 changes nothing, more than 1 smooths"
        )
    return temperature


def check_temper(value: Any) -> Temper:
    """Returns where the temperature acts, or raises `MemberError`."""
    if value not in TEMPERS:
        raise MemberError(
            f"temper={value!r} must be 'mean' (the temperature acts on the averaged distribution), "
            "'sample' (on each mask sample before averaging), or of a mixture of softmaxes "
            "'component' (on the logits of its components before they are mixed)"
        )
    return value


@dataclasses.dataclass(frozen=True)
class Member:
    """One member of the extended dropout family.

    At multiplier 0 every alpha is the same deterministic model, so it is set to 0 there. At alpha 0
    a temperature on each sample is one on the mean, so "sample" becomes "mean". Equal members
    compare equal.

    Args:
        alpha: Power of the mean over mask samples in [0, 1]; 0 is geometric, 1 arithmetic.
        multiplier: Factor in [0, 1] on every dropout rate; 0 is deterministic.
        temperature: Softmax temperature, above 0; it divides.
        temper: Where the temperature acts: on the averaged distribution ("mean"), on each sample
            before averaging ("sample"), or on the logits of each component before they are mixed
            ("component", of a mixture of softmaxes only).

    Raises:
        MemberError: If a value lies outside its domain.

    Example:
        >>> Member(alpha=1.0, multiplier=0.8, temperature=1.1)
        Member(alpha=1, multiplier=0.8, temperature=1.1)
        >>> Member(alpha=0.5, multiplier=0) == DET
        True
        >>> print(AMC.at_temperature(0.95))
        arithmetic mean, dropout rates x1, T = 0.95
    """

    alpha: float = 1.0
    multiplier: float = 1.0
    temperature: float = 1.0
    temper: Temper = "mean"

    def __post_init__(self) -> None:
        multiplier = check_multiplier(self.multiplier)
        alpha, temper = check_alpha(self.alpha), check_temper(self.temper)
        if multiplier == 0:
            alpha = 0.0
        if alpha == 0 and temper == "sample":
            temper = "mean"
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "multiplier", multiplier)
        object.__setattr__(self, "temperature", check_temperature(self.temperature))
        object.__setattr__(self, "temper", temper)

    @property
    def deterministic(self) -> bool:
        """Whether one pass without dropout computes this member."""
        return self.multiplier == 0

    @property
    def unchanged(self) -> bool:
        """Whether this is the deterministic model at T = 1, wherever a temperature would act."""
        return self.deterministic and self.temperature == 1

    def at_temperature(self, temperature: float) -> "Member":
        """The same member at another temperature."""
        return dataclasses.replace(self, temperature=temperature)

    def __repr__(self) -> str:
        parts = [f"alpha={self.alpha:g}", f"multiplier={self.multiplier:g}"]
        parts.append(f"temperature={self.temperature:.6g}")
        if self.temper != "mean":
            parts.append(f"temper={self.temper!r}")
        return f"Member({', '.join(parts)})"

    def __str__(self) -> str:
        if self.deterministic:
            name = "deterministic"
        else:
            mean = {0.0: "geometric mean", 1.0: "arithmetic mean"}.get(
                self.alpha, f"power mean {self.alpha:g}"
            )
            name = f"{mean}, dropout rates x{self.multiplier:g}"
        each = {"sample": " on each sample", "component": " on each component"}
        return f"{name}, T = {self.temperature:.4g}{each.get(self.temper, '')}"


DET = Member(alpha=0.0, multiplier=0.0)
GMC = Member(alpha=0.0, multiplier=1.0)
AMC = Member(alpha=1.0, multiplier=1.0)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The members to evaluate: alphas × multipliers, each at every temperature.

    The deterministic member is always part of the grid, whether 0 is among the multipliers or not.

    Args:
        alphas: Powers of the mean in [0, 1].
        multipliers: Factors on the dropout rates in [0, 1].
        temper: Where temperatures act. "mean" serves every temperature from one accumulator;
            "sample" and "component" need one accumulator per alpha and temperature node.

    Example:
        >>> grid = Grid(alphas=(0, 1), multipliers=(0, 0.5, 1))
        >>> len(grid)
        5
        >>> list(grid)[0]
        Member(alpha=0, multiplier=0, temperature=1)
    """

    alphas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    multipliers: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    temper: Temper = "mean"

    def __post_init__(self) -> None:
        alphas = _ascending("alphas", self.alphas, check_alpha)
        multipliers = _ascending("multipliers", self.multipliers, check_multiplier)
        object.__setattr__(self, "alphas", alphas)
        object.__setattr__(self, "multipliers", multipliers)
        object.__setattr__(self, "temper", check_temper(self.temper))

    @property
    def stochastic(self) -> tuple[float, ...]:
        """The multipliers above 0, which need mask samples."""
        return tuple(m for m in self.multipliers if m > 0)

    @property
    def tempered_alphas(self) -> tuple[float, ...]:
        """The alphas whose members are not those of a temperature that acts on the mean."""
        if self.temper == "component":
            return self.alphas
        return tuple(a for a in self.alphas if a > 0 and self.temper == "sample")

    def __iter__(self) -> Iterator[Member]:
        yield Member(0.0, 0.0, temper=self.temper)
        for multiplier in self.stochastic:
            for alpha in self.alphas:
                yield Member(alpha, multiplier, temper=self.temper)

    def __len__(self) -> int:
        return 1 + len(self.stochastic) * len(self.alphas)


def _ascending(name: str, values: Iterable[Any], check: Any) -> tuple[float, ...]:
    if isinstance(values, int | float | str) or not isinstance(values, Iterable):
        raise MemberError(f"{name}={values!r} must be a sequence of numbers")
    checked = tuple(sorted({check(value) for value in values}))
    if not checked:
        raise MemberError(f"{name} is empty; give at least one value")
    return checked
