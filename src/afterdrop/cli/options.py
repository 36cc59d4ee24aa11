"""Types of optional command-line flags, and the check that every value of a verb passes."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from afterdrop.errors import DataError

_POSITIONAL = {"model": "RUN|MODEL", "batches": "DATA"}  # as the help calls them

# Shown in the help without tyro's "None".

OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
OptionalPaths = Annotated[
    tuple[Path, ...] | None, tyro.conf.arg(metavar="PATH...", help_behavior_hint="")
]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
OptionalRange = Annotated[
    tuple[float, float] | None, tyro.conf.arg(metavar="LOW HIGH", help_behavior_hint="")
]

Likelihood = Literal["categorical", "binary", "multilabel", "gaussian", "squared_error"]


def checked(verb: Callable[..., int | None]) -> Callable[..., int | None]:
    """The verb, which refuses numbers that are not finite or do not fit 64 bits.

    Raises:
        DataError: When called with such a value; names the option.
    """

    @functools.wraps(verb)
    def run(*arguments: Any, **options: Any) -> int | None:
        given = inspect.signature(verb).bind(*arguments, **options)
        for name, values in given.arguments.items():
            for value in values if isinstance(values, tuple) else (values,):
                _check_value(name, value)
        return verb(*arguments, **options)

    return run


def without_effect(
    verb: Callable[..., Any], given: Mapping[str, Any], meaningful: Collection[str]
) -> list[str]:
    """Options that were given although they have no effect, as a user writes them.

    Args:
        verb: The verb; an option counts as given if it differs from its default.
        given: The values of all options.
        meaningful: Names of those that have an effect.
    """
    found = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name not in meaningful and given[name] != parameter.default:
            shown = "--" + name.replace("_", "-")
            positional = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
            found.append(_POSITIONAL.get(name, name) if positional else shown)
    return found


def _check_value(name: str, value: object) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise DataError(f"{name} has {value.bit_length()} bits; give an integer that fits 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{name}={value} is not finite; give a finite number")
    if isinstance(value, str | Path) and "\0" in str(value):
        raise DataError(f"{name}={str(value)!r:.60} has a null character; leave it out")


def logits_place(text: str | None) -> int | str | None:
    """An index if the text is a number, otherwise a key."""
    is_index = text is not None and text.isdecimal() and len(text) < 10
    return int(text) if text is not None and is_index else text
