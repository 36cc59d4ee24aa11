"""What a choice is made of: candidates in the order of a ranking, and other data."""

from __future__ import annotations

import dataclasses

from afterdrop.family.estimates import Estimate
from afterdrop.family.member import Member


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A member in the ranking.

    Attributes:
        member: With its temperature.
        xe: What is minimised at the predictor's number of samples: cross entropy, or the criterion
            that was chosen by (`Choice.by`).
        difference: Paired difference of that to the best candidate, with its errors.
        tuned: Whether its temperature was fitted.
        at_edge: Whether the fitted temperature lies at the edge of its bracket.
        also: The same on other data, in the order of `Choice.also`; NaN where not evaluated.
    """

    member: Member
    xe: float
    difference: Estimate
    tuned: bool
    at_edge: bool
    also: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class OtherData:
    """What a choice does on data that it was not made on.

    Attributes:
        name: Of the data.
        gain: Paired gain over the deterministic model at T = 1 there. Of an ensemble, its error is
            that of the data: the members are those that predict.
    """

    name: str
    gain: Estimate

    @property
    def worse(self) -> bool:
        """Whether the choice is worse than deterministic by more than two standard errors."""
        return self.gain.value < -2 * self.gain.error
