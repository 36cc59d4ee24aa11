"""The rates at which dropout sites drop: each site's own rate times the multipliers of a pass.

Legend: M multipliers.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from afterdrop.errors import SiteError


@dataclasses.dataclass(frozen=True)
class Multipliers:
    """The M multipliers that run together in a forward pass.

    Every dropout site asks this object for its rates. Nothing else may assume that a multiplier is
    the same number for all sites.

    Attributes:
        values: M factors on every rate.

    Example:
        >>> Multipliers((0.5, 1.0)).rates("encoder.dropout", 0.4)
        (0.2, 0.4)
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, multipliers: "Multipliers | Sequence[float] | float") -> "Multipliers":
        """Converts one number or a sequence of numbers; returns `Multipliers` unchanged."""
        if isinstance(multipliers, Multipliers):
            return multipliers
        if isinstance(multipliers, int | float):
            return cls((multipliers,))
        return cls(tuple(multipliers))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def largest(self) -> float:
        """The largest multiplier, which drops most."""
        return max(self.values)

    def rates(self, site: str, rate: float) -> tuple[float, ...]:
        """The rates at which a site drops, one per multiplier.

        Args:
            site: The name of the site (`Site.name`). All sites have the same multipliers for now.
            rate: The site's own rate, at which it drops in training.
        """
        return tuple(multiplier * rate for multiplier in self.values)

    def declared_rate(self, path: str, rate: float) -> float:
        """The rate to set in an attribute of the model, which all rows of a pass share.

        Args:
            path: The dotted path of the attribute, as declared in `rates=`.
            rate: The value of the attribute.
        """
        rates = self.rates(path, rate)
        if len(rates) != 1:
            raise SiteError(
                f"rates={path!r} is one attribute for all rows of a pass, but {len(rates)} "
                "multipliers run together; run them one at a time"
            )
        return rates[0]


UNSCALED = Multipliers((1.0,))


@contextlib.contextmanager
def scaled_attributes(
    model: nn.Module, paths: Sequence[str], multipliers: Multipliers
) -> Iterator[None]:
    """Scales the declared rates of a model by a multiplier; restores them on exit.

    Args:
        model: The module.
        paths: Dotted paths of attributes that hold rates, as declared in `rates=`.
        multipliers: A single multiplier, unless `paths` is empty.
    """
    owners = [(path, *_owner(model, path)) for path in paths]
    values = [getattr(owner, name) for _, owner, name in owners]
    try:
        for (path, owner, name), value in zip(owners, values):
            setattr(owner, name, multipliers.declared_rate(path, value))
        yield
    finally:
        for (_, owner, name), value in zip(owners, values):
            setattr(owner, name, value)


def _owner(model: nn.Module, path: str) -> tuple[Any, str]:
    """The object and the attribute's name for a dotted path such as "encoder.dropoute"."""
    *parents, name = path.split(".")
    owner: Any = model
    try:
        for parent in parents:
            owner = owner[int(parent)] if parent.isdigit() else getattr(owner, parent)
        value = getattr(owner, name)
    except (AttributeError, IndexError, TypeError) as error:
        raise SiteError(f"rates={path!r} is not an attribute of the model: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise SiteError(f"rates={path!r} holds {value!r}; a rate is a number in [0, 1)")
    return owner, name
