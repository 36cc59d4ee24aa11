"""The objective of tuning: the validation XE of a member at its optimal temperature.

The paper tunes for the deterministic member at its optimal temperature, which anticipates
selection. The temperature is fitted on a part of the validation data and the XE is taken on all of
it, which limits how much the temperature can fit the noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from afterdrop.errors import MemberError, SiteError
from afterdrop.evaluation import Request, Scores
from afterdrop.evaluation.loop import Execution
from afterdrop.family.member import DET, Grid, Member
from afterdrop.masks.uniforms import Plan
from afterdrop.runs import Run
from afterdrop.train.checks import check_count, check_one_of

Temperature = Literal["optimal", "plain"]
NAMED = {"det": DET, "gmc": Member(0.0, 1.0), "amc": Member(1.0, 1.0)}


@dataclass(frozen=True)
class ObjectiveValue:
    """The value of the objective for one trained model.

    Attributes:
        xe: Validation XE in nats, which is minimised.
        error: Its standard error over the data.
        temperature: The temperature of the member.
    """

    xe: float
    error: float
    temperature: float


@dataclass(frozen=True)
class Objective:
    """A member, and how its XE is computed.

    Attributes:
        alpha: The alpha of the member.
        multiplier: The multiplier of the dropout rates; 0 is deterministic.
        temperature: `"optimal"`, or `"plain"` for T = 1.
        targets: Approximate number of validation targets that the temperature is fitted on.
        num_samples: Number of mask samples, unless the member is deterministic.

    Example:
        >>> Objective.parse("amc").multiplier, Objective.parse("0.5,0.8").multiplier
        (1.0, 0.8)
    """

    alpha: float = 0.0
    multiplier: float = 0.0
    temperature: Temperature = "optimal"
    targets: int = 50_000
    num_samples: int = 20

    def __post_init__(self) -> None:
        Member(self.alpha, self.multiplier)
        check_one_of("temperature", self.temperature, ("optimal", "plain"))
        check_count("targets", self.targets)
        check_count("num_samples", self.num_samples, least=2)

    @classmethod
    def parse(cls, member: str, temperature: Temperature = "optimal") -> Objective:
        """The objective of a member by name (det, gmc, amc) or as ALPHA,MULTIPLIER.

        Raises:
            MemberError: If the text has another form.
        """
        found = NAMED.get(member.lower())
        if found is None:
            try:
                alpha, multiplier = map(float, member.split(","))
            except ValueError:
                raise MemberError(
                    f"member={member!r} must be det, gmc, amc, or ALPHA,MULTIPLIER such as 0.5,0.8"
                ) from None
            found = Member(alpha, multiplier)
        return cls(found.alpha, found.multiplier, temperature)

    @property
    def member(self) -> Member:
        """The member, at T = 1."""
        return Member(self.alpha, self.multiplier)

    def of_run(self, run: Path, device: str, data: Path | None) -> ObjectiveValue:
        """The objective for the best weights of a run.

        Args:
            run: The run folder.
            device: The device to evaluate on.
            data: The folder of the named data sets.
        """
        folder = Run.open(run)
        is_text = folder.config.objective.window is not None
        request = Request(
            Grid((self.alpha,), (self.multiplier,)),
            Plan(self.num_samples),
            stream=folder.stream(stripes=folder.config.validation.stripes) if is_text else None,
        )
        try:
            scores = folder.evaluate(request, Execution(), which="best", device=device, folder=data)
        except SiteError:  # all rates are 0, so every member is deterministic
            return replace(self, alpha=0.0, multiplier=0.0).of_run(run, device, data)
        return self.of_scores(scores)

    def of_scores(self, scores: Scores) -> ObjectiveValue:
        """The objective from scores on validation data."""
        member = self.member
        if self.temperature == "optimal":
            weights = spread(scores.clusters, self.targets)
            found, _, _ = scores.fit_weighted(member, weights.unsqueeze(0))
            member = member.at_temperature(found.item())
        xe = scores.xe(member)
        return ObjectiveValue(xe.value, xe.data_error, member.temperature)


def spread(clusters: torch.Tensor, targets: int) -> torch.Tensor:
    """Weights [B] that select every n-th example, so that about `targets` targets are selected.

    Example:
        >>> spread(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), targets=4)
        tensor([1., 0., 1., 0.], dtype=torch.float64)
    """
    step = max(1, -(-len(clusters) // targets))
    weights = torch.zeros(int(clusters.max()) + 1, dtype=torch.float64)
    weights[::step] = 1
    return weights
