"""Cross entropies in the unit of the field: perplexity per word, bits per character, else nats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from afterdrop.family.estimates import Estimate

_LARGEST_EXPONENT = 700.0  # of float64, a little less than log(1.8e308)


@dataclass(frozen=True)
class Presentation:
    """A unit for cross entropies.

    Attributes:
        name: The unit.
        show: Converts nats to the unit.
        slope: The derivative of `show`, for errors.
        digits: Number of decimals to print.
    """

    name: str
    show: Callable[[float], float]
    slope: Callable[[float], float]
    digits: int

    def value(self, found: Estimate | None) -> float | None:
        """The value of an estimate in this unit."""
        return None if found is None else self.show(found.value)

    def error(self, found: Estimate | None) -> float | None:
        """The error of an estimate in this unit, to first order."""
        return None if found is None else found.error * self.slope(found.value)


def presentation(unit: str) -> Presentation:
    """The unit for targets of a kind: "word", "char", "byte" or anything else.

    Example:
        >>> words = presentation("word")
        >>> words.name, round(words.show(4.051), 1)
        ('perplexity', 57.5)
        >>> round(presentation("char").show(0.886), 3)
        1.278
    """
    if unit == "word":
        return Presentation("perplexity", perplexity, perplexity, 2)
    if unit in ("char", "byte"):
        return Presentation(
            f"bits per {unit}", lambda xe: xe / math.log(2), lambda _: 1 / math.log(2), 4
        )
    return Presentation("XE", lambda xe: xe, lambda _: 1.0, 4)


def perplexity(xe: float) -> float:
    """The exponential of a cross entropy in nats; infinite beyond the range of floats.

    Example:
        >>> round(perplexity(4.0), 1), perplexity(3302.0)
        (54.6, inf)
    """
    return math.inf if xe > _LARGEST_EXPONENT else math.exp(xe)
