"""Checks of arguments that the models share, and the error they raise.

Each check says the argument, its value, what is allowed and what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from afterdrop.errors import AfterdropError


class ModelError(AfterdropError, ValueError):
    """A model configuration or a model input outside its domain.

    Example:
        >>> try:
        ...     check_rate("state_dropout", 1.5)
        ... except ValueError as error:
        ...     print(error)
        state_dropout is 1.5; a dropout rate is a number in [0, 1). \
Give the probability of dropping a unit, 0 for no dropout.
    """


def check_rate(name: str, value: object) -> None:
    """Requires a probability of dropping, in [0, 1): at 1 the factor 1/(1 - rate) is undefined.

    Example:
        >>> check_rate("input_dropout", 0.4)
    """
    if not _is_number(value) or not 0.0 <= value < 1.0:  # type: ignore[operator]
        raise ModelError(
            f"{name} is {value!r}; a dropout rate is a number in [0, 1). "
            "Give the probability of dropping a unit, 0 for no dropout."
        )


def check_size(name: str, value: object) -> None:
    """Requires a positive whole number.

    Example:
        >>> check_size("vocabulary", 10_001)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{name} is {value!r}; a size is a whole number of at least 1. Give a positive int."
        )


def check_count(name: str, value: object) -> None:
    """Requires a whole number of at least 0.

    Example:
        >>> check_count("mogrifier_rounds", 5)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(
            f"{name} is {value!r}; it must be a whole number of at least 0. Give an int, 0 for "
            "none."
        )


def check_sizes(name: str, values: object, *, least: int = 1) -> None:
    """Requires a sequence of at least `least` positive whole numbers.

    Example:
        >>> check_sizes("hidden_sizes", (650, 650))
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) < least:
        raise ModelError(
            f"{name} is {values!r}; it takes a sequence of at least {least} sizes, one per layer. "
            "Give a list such as [650, 650]."
        )
    for index, value in enumerate(values):
        check_size(f"{name}[{index}]", value)


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Requires one of a few words.

    Example:
        >>> check_choice("stacking", "skip", ("skip", "residual", "plain"))
    """
    if value not in allowed:
        raise ModelError(
            f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}. Choose one of them."
        )


def check_number(name: str, value: object) -> None:
    """Requires a finite real number.

    Example:
        >>> check_number("forget_bias", 1.0)
    """
    if not _is_number(value) or not abs(value) < float("inf"):  # type: ignore[arg-type]
        raise ModelError(f"{name} is {value!r}; it must be a finite number. Give an int or float.")


def check_flag(name: str, value: object) -> None:
    """Requires True or False, not something merely truthy such as "false".

    Example:
        >>> check_flag("tied", True)
    """
    if not isinstance(value, bool):
        raise ModelError(f"{name} is {value!r}; allowed are True and False. Give a bool.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
