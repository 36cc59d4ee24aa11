"""Checks of training settings, and the errors they raise.

Each error message has the dotted name of the setting, its value, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from afterdrop.errors import AfterdropError

_LARGEST = 1e30  # a number in 32 bits, and so are the products that training makes


class ConfigError(AfterdropError, ValueError):
    """A training setting that is unknown, outside its domain, or in conflict with another.

    Example:
        >>> try:
        ...     check_number("optimiser.learning_rate", -1, above=0)
        ... except ValueError as error:
        ...     print(error)
        optimiser.learning_rate is -1; it takes a finite number above 0. Give one in that range.
    """


class TrainError(AfterdropError, RuntimeError):
    """A training run that cannot start or continue."""


class DivergedError(TrainError):
    """A training run whose loss or validation XE is no longer finite."""


def check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
) -> None:
    """Requires a finite number in a range.

    Example:
        >>> check_number("objective.alpha", 0.5, least=0, most=1)
        >>> check_number("optimiser.learning_rate", 1e39, above=0)
        Traceback (most recent call last):
        afterdrop.train.checks.ConfigError: optimiser.learning_rate is 1e+39; it takes a finite \
number above 0 and at most 1e+30. Give one in that range.
    """
    if most is None and isinstance(value, int | float) and _LARGEST < value < float("inf"):
        most = _LARGEST
    limits = [
        f"{word} {limit:g}"
        for word, limit in (("above", above), ("at least", least), ("at most", most))
        if limit is not None
    ]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not abs(value) <= _LARGEST
        or (above is not None and not value > above)
        or (least is not None and not value >= least)
        or (most is not None and not value <= most)
    ):
        raise ConfigError(
            f"{name} is {value!r}; it takes a finite number {' and '.join(limits)}. "
            "Give one in that range."
        )


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Requires a whole number of at least `least`.

    Example:
        >>> check_count("schedule.intervals", 10)
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ConfigError(
            f"{name} is {value!r}; it takes an integer from {least} to 2**63 - 1. Give one in that "
            "range."
        )


def check_integers(name: str, value: object) -> None:
    """Requires that every integer in nested values fits 64 bits.

    Example:
        >>> check_integers("model", {"hidden_sizes": [2**64]})
        Traceback (most recent call last):
        afterdrop.train.checks.ConfigError: model.hidden_sizes[0] is 18446744073709551616; it does \
not fit 64 bits. Give an integer of at most 2**63 - 1.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            check_integers(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            check_integers(f"{name}[{index}]", inner)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        # Python refuses to print thousands of digits.
        shown = value if value.bit_length() < 1000 else f"an integer of {value.bit_length()} bits"
        limit = "at most 2**63 - 1" if value > 0 else "at least -2**63"
        raise ConfigError(
            f"{name} is {shown}; it does not fit 64 bits. Give an integer of {limit}."
        )


def check_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Requires one of a few strings.

    Example:
        >>> check_one_of("optimiser.name", "adam", ("adam-tf", "adam"))
    """
    if value not in allowed:
        raise ConfigError(
            f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}. Choose one of them."
        )


def check_known(section: str, given: Collection[str], known: Collection[str]) -> None:
    """Requires that all given names are known; the error suggests the nearest one.

    Example:
        >>> check_known("schedule", ["interval"], ["intervals", "steps_per_interval"])
        Traceback (most recent call last):
        afterdrop.train.checks.ConfigError: there is no setting 'schedule.interval'; did you mean \
'schedule.intervals'? Known are intervals, steps_per_interval.
    """
    prefix = f"{section}." if section else ""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean '{prefix}{near[0]}'?" if near else "."
            raise ConfigError(
                f"there is no setting '{prefix}{name}'{hint} Known are {', '.join(sorted(known))}."
            )
