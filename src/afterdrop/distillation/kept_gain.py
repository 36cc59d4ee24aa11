"""How much of a choice's gain over deterministic evaluation another model keeps.

On the same targets, with XE of the deterministic model at T = 1 (d), the chosen member (c) and the
copy (s):

    share = mean(d − s) / mean(d − c)

Its error is that of the mean of (d − s) − share · (d − c), over mean(d − c): the numerator and the
denominator are paired, so that what makes an example easy or hard for all of them cancels.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from afterdrop.errors import ScoresError
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import DET, Member


@dataclasses.dataclass(frozen=True)
class KeptGain:
    """What a copy keeps of a gain, on some data.

    Attributes:
        split: Name of the data.
        gain: Of the choice over the deterministic model at T = 1 (nats).
        copy_gain: Of the copy over the same.
        share: copy_gain / gain; NaN where nothing was gained.
        error: Standard error of the share, from masks and data, paired.
        temperature_share: What temperature alone keeps: the model itself at its best T, in one pass
            and without training.
        temperature_error: Standard error of that.
    """

    split: str
    gain: Estimate
    copy_gain: Estimate
    share: float
    error: float
    temperature_share: float
    temperature_error: float

    def __str__(self) -> str:
        if math.isnan(self.share):
            return f"On {self.split}: the choice gains nothing, so that there is nothing to keep."
        return (
            f"On {self.split}: one pass keeps {100 * self.share:.0f} ± {100 * self.error:.0f} % of "
            f"the gain of {self.gain.value:.4f} ± {self.gain.error:.4f} nats; temperature alone "
            f"keeps {100 * self.temperature_share:.0f} ± {100 * self.temperature_error:.0f} %."
        )


def kept_gain(
    scores: Scores, member: Member, tempered: Member, copy: Scores, copy_member: Member
) -> KeptGain:
    """Compares a copy with the chosen member of the model that it was made of.

    Args:
        scores: Of the model.
        member: The chosen member.
        tempered: The deterministic member at its best temperature.
        copy: Scores of the copy, on the same data.
        copy_member: How the copy predicts: deterministic.

    Raises:
        ScoresError: If the data are not the same.
    """
    same = scores.targets.shape == copy.targets.shape and torch.equal(scores.targets, copy.targets)
    if not same:
        raise ScoresError("the Scores of the copy are of other targets than those of the model")
    plain = scores.values(DET)
    gain = plain.minus(scores.values(member))
    copied = plain.minus(copy.values(copy_member))
    share, error = _share(copied, gain, scores)
    alone = _share(plain.minus(scores.values(tempered)), gain, scores)
    found = (_estimate(values, scores) for values in (gain, copied))
    return KeptGain(scores.split, next(found), next(found), share, error, *alone)


def _share(part: Values, whole: Values, scores: Scores) -> tuple[float, float]:
    """The ratio of two paired mean gains, and its error."""
    total = whole.whole.mean().item()
    if not total > 0 or math.isinf(total):
        return math.nan, math.nan
    share = part.whole.mean().item() / total
    halves = None if whole.halves is None else part.whole - share * whole.halves
    rest = Values(part.whole - share * whole.whole, halves, whole.num_samples)
    return share, _estimate(rest, scores).error / total


def _estimate(values: Values, scores: Scores) -> Estimate:
    return estimate(values, scores.clusters, shared=scores.protocol.shared)
