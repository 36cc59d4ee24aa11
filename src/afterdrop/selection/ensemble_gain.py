"""What an ensemble gains over its models, over the plain mean, and with how many models."""

from __future__ import annotations

import dataclasses
import math

from afterdrop.evaluation.ensemble import Ensemble
from afterdrop.evaluation.scores import Scores
from afterdrop.evaluation.scores.member_bounds import sample_log_likelihoods
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import DET, Member


@dataclasses.dataclass(frozen=True)
class EnsembleGain:
    """Gains in cross entropy (nats) of the chosen mean of an ensemble.

    Attributes:
        ensemble: Whose samples these are.
        over_mean: Over one sample taken at random: the mean cross entropy of the samples at T = 1,
            which is the negative bound. Its error takes that mean for known, which makes it rather
            too large.
        over_best: Over the best source alone, without dropout, at T = 1.
        over_plain: Over the arithmetic mean at T = 1; None if alpha 1 was not evaluated.
        curve: Number of samples and XE at T = 1 of the chosen power mean (of the arithmetic mean if
            one source alone is chosen): one sample, all but a group of the jackknife, and all.
        limit: Where that tends to with many more samples of the same kind.
    """

    ensemble: Ensemble
    over_mean: Estimate
    over_best: Estimate
    over_plain: Estimate | None
    curve: tuple[tuple[float, float], ...]
    limit: float

    def lines(self) -> list[str]:
        """For the printed choice."""
        one = "the mean member" if self.ensemble.masks is None else "a sample"
        gains = [f"{_shown(self.over_mean)} over {one} alone"]
        if self.over_plain is not None:
            gains.append(f"{_shown(self.over_plain)} over the plain mean (arithmetic, T = 1)")
        points = ", ".join(f"{xe:.4f} with {k:.3g}" for k, xe in self.curve)
        limit = "" if math.isnan(self.limit) else f"; about {self.limit:.4f} with many more"
        what = "members" if self.ensemble.masks is None else "samples"
        return [
            f"It gains {', and '.join(gains)}.",
            f"XE at T = 1 by the number of {what}: {points}{limit}.",
        ]


def ensemble_gain(scores: Scores, ensemble: Ensemble, member: Member) -> EnsembleGain:
    """What the chosen member of an ensemble gains.

    Args:
        scores: Of the ensemble.
        ensemble: Whose samples these are.
        member: The chosen member, at its temperature.
    """
    usual = Member(1.0, 1.0, temper=scores.protocol.grid.temper)
    held = usual in scores.members
    shown = member.at_temperature(1.0)
    if member.deterministic:
        shown = usual if held else scores.members[-1]
    row, _ = scores.index(shown)
    chosen = scores.values(member)
    alone = Values(-sample_log_likelihoods(scores, row), None, scores.num_samples)
    mean = estimate(alone.minus(chosen), scores.clusters, shared=scores.protocol.shared)
    return EnsembleGain(
        ensemble,
        over_mean=mean,
        over_best=scores.difference(DET, member),
        over_plain=scores.difference(usual, member) if held else None,
        curve=tuple((k, found.value) for k, found in scores.curve(shown)),
        limit=scores.xe(shown).corrected,
    )


def _shown(gain: Estimate) -> str:
    return f"{gain.value:.4f} ± {gain.error:.4f} nats"
