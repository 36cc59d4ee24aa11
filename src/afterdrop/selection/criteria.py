"""What a choice minimises: cross entropy, or another loss of each target.

    xe         cross entropy: at any number of samples, temperatures fitted exactly
    brier      Brier score, Σ_c (p(c) − [c = y])², or (p(1) − y)² of labels
    accuracy   share of targets that are not the most probable class
    ece        expected calibration error with 15 bins of equal width; bins and the sign of each
               bin's gap are those of all targets
    crps       continuous ranked probability score, of predicted numbers
    function   of (scores, member), which returns losses [N] of the targets; lower is better

All but XE are known for the samples that were evaluated, and fit temperatures on a grid.

Legend: N targets, R rows of weights, G examples or other clusters of targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from afterdrop.errors import AfterdropError, MemberError
from afterdrop.evaluation.scores import Fit, Scores
from afterdrop.evaluation.scores.metrics import brier_losses
from afterdrop.family.calibration import calibration_residuals
from afterdrop.family.estimates import Values, cluster_sums
from afterdrop.family.member import Member
from afterdrop.family.temperature import Nodes

Losses = Callable[[Scores, Member], Tensor]
WORST = 1e30  # what an infinite loss counts as in sums over some examples
_TEMPERATURES = 17  # of the grid
_REACH = 4.0  # from the middle of the bracket divided by this to the middle times this


def _errors(scores: Scores, member: Member) -> Tensor:
    return 1 - scores.correct(member).double()


def _ece(scores: Scores, member: Member) -> Tensor:
    return calibration_residuals(scores.confidence(member), scores.correct(member), 15, "width")


def _crps(scores: Scores, member: Member) -> Tensor:
    if scores.protocol.has_classes:
        raise MemberError(
            "by='crps' needs predictions of numbers, and these scores are of classes; their "
            "analogue is by='brier'"
        )
    return scores.summary(member, "crps_at")


_LOSSES: Mapping[str, tuple[Losses | None, str]] = {
    "xe": (None, "nats"),
    "brier": (brier_losses, "of the Brier score"),
    "accuracy": (_errors, "of accuracy"),
    "ece": (_ece, "of ECE"),
    "crps": (_crps, "of CRPS"),
}


@dataclasses.dataclass(frozen=True)
class Criterion:
    """What a choice minimises.

    Attributes:
        name: As given to `select`, or the name of the function.
        unit: Of its values, for what is printed.
        losses: Losses [N] of the targets; None for XE.
    """

    name: str
    unit: str
    losses: Losses | None

    @classmethod
    def of(cls, by: str | Losses) -> Criterion:
        """The criterion of a name or a function.

        Raises:
            MemberError: If there is no such criterion.
        """
        if callable(by):
            name = getattr(by, "__name__", "function")
            return cls(name, f"of {name}", by)
        if not isinstance(by, str) or by not in _LOSSES:
            raise MemberError(
                f"by={by!r} must be one of {', '.join(_LOSSES)}, or a function of (scores, member) "
                "that returns the losses [N] of the targets"
            )
        losses, unit = _LOSSES[by]
        return cls(by, unit, losses)

    def values(self, scores: Scores, member: Member, k: float) -> Values:
        """Losses of the targets that `k` samples would deliver."""
        if self.losses is None:
            return forecast(scores, member, k)
        returned = self.losses(scores, member)
        try:
            found = torch.as_tensor(returned)
        except (RuntimeError, TypeError, ValueError) as error:
            raise MemberError(
                f"by={self.name} returned {type(returned).__name__} ({error}); a criterion returns "
                "a tensor with one loss for each target"
            ) from error
        if found.shape != scores.targets.shape:
            raise MemberError(
                f"by={self.name} returned shape {tuple(found.shape)}; a criterion returns one loss "
                f"for each of the {scores.num_targets} targets"
            )
        own = _LOSSES.get(self.name, (None,))[0] is not self.losses
        if own and bool(found.isnan().any()):
            raise MemberError(
                f"by={self.name} returned NaN for {int(found.isnan().sum())} of the "
                f"{scores.num_targets} targets of {member}; return a number for each, and inf for "
                "the worst"
            )
        samples = 0 if member.deterministic else scores.num_samples
        return Values(found.double(), None, samples, member=member)

    def fit(self, scores: Scores, member: Member, k: float) -> Fit:
        """A member at its best temperature."""
        if self.losses is None:
            return scores.fit(member, k)
        everyone = torch.ones(1, int(scores.clusters.max()) + 1, dtype=torch.float64)
        temperature, _, edge = self.fit_weighted(scores, member, everyone, k)
        return Fit(member.at_temperature(temperature.item()), bool(edge.item()))

    def fit_weighted(
        self, scores: Scores, member: Member, weights: Tensor, k: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For rows of weights [R, G]: best temperature, loss there, and if it is an extreme one."""
        if self.losses is None:
            return scores.fit_weighted(member, weights, k)
        grid = self._temperatures(scores, member)
        rows = [self._mean(scores, member.at_temperature(t), weights, k) for t in grid]
        loss, best = torch.stack(rows).min(0)
        temperature = torch.tensor(grid, dtype=torch.float64)[best]
        lowest, highest = min(grid), max(grid)
        edge = (temperature == lowest) | (temperature == highest)
        return temperature, loss, edge & (lowest < highest)

    def _mean(self, scores: Scores, member: Member, weights: Tensor, k: float) -> Tensor:
        values = self.values(scores, member, k).whole
        return weighted_means(values, scores.clusters, weights)

    def _temperatures(self, scores: Scores, member: Member) -> list[float]:
        """The optimum of XE first, which wins where temperature makes no difference."""
        fitted = scores.fit(member).member.temperature
        if self.name == "accuracy" and member.temper == "mean":
            return [fitted]
        nodes = _nodes(scores, member)
        middle = (nodes.low * nodes.high) ** 0.5
        reach = min(_REACH, (nodes.high / nodes.low) ** 0.5)
        steps = [2 * i / (_TEMPERATURES - 1) - 1 for i in range(_TEMPERATURES)]
        return [fitted, *(middle * reach**step for step in steps)]


def _nodes(scores: Scores, member: Member) -> Nodes:
    """The temperatures at which a member is known; of a noise variance, relative to T = 1."""
    if not scores.protocol.has_classes:
        return scores.density_nodes
    return scores.protocol.nodes if member.temper == "mean" else scores.protocol.sample_nodes


def weighted_means(values: Tensor, clusters: Tensor, weights: Tensor) -> Tensor:
    """Means [R] of values [N] for rows of weights [R, G] over clusters."""
    totals = weights @ cluster_sums(torch.ones(len(clusters), dtype=torch.float64), clusters)
    return weights @ cluster_sums(values.clamp_max(WORST), clusters) / totals


def forecast(scores: Scores, member: Member, k: float) -> Values:
    """What `k` samples would deliver: fewer never something better, whatever noise says."""
    values = scores.values(member)
    found = values.moved(k)
    if k >= values.num_samples or not found.whole.mean() < values.whole.mean():
        return found
    assert found.halves is not None
    halves = values.whole + found.halves - found.halves.mean(0)
    return dataclasses.replace(found, whole=values.whole, halves=halves)


def loss_elsewhere(criterion: Criterion, other: Scores, member: Member, k: float) -> float:
    """Mean loss of a member on other data; NaN if it was not evaluated there."""
    try:
        return criterion.values(other, member, k).whole.mean().item()
    except AfterdropError:
        return float("nan")
