"""Metrics of categorical predictions: accuracy, Brier score, calibration, entropies, perplexity.

Each is a function of Scores and a member and gives an `Estimate`. The halves of the samples keep
cross entropies only: of the other metrics, the mask error and the value at another number of
samples are not known (NaN) unless the member is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afterdrop.errors import ScoresError
from afterdrop.family.calibration import Binning, calibration_error, calibration_residuals
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import Member

if TYPE_CHECKING:
    from afterdrop.evaluation.scores.scores import Scores

Band = tuple[float, float]


def correct(scores: Scores, member: Member) -> Tensor:
    """[N] whether each target is the most probable class."""
    return scores.curve_of(member).predicted(member.temperature) == scores.targets


def confidence(scores: Scores, member: Member) -> Tensor:
    """[N] probability of the most probable class."""
    return scores.curve_of(member).log_confidence(member.temperature).exp()


def accuracy(scores: Scores, member: Member) -> Estimate:
    """Share of targets that are the most probable class."""
    return _estimate(scores, member, correct(scores, member).double())


def brier(scores: Scores, member: Member) -> Estimate:
    """Brier score: mean of Σ_c (p(c) − [c = y])²."""
    p = (-scores.values(member).whole).exp()
    square = scores.curve_of(member).log_square(member.temperature).exp()
    return _estimate(scores, member, 1 - 2 * p + square)


def ece(scores: Scores, member: Member, num_bins: int, binning: Binning) -> Estimate:
    """Expected calibration error.

    Its data error holds the bins and the sign of each bin's gap fixed, so it is too small where
    gaps are not larger than their noise.
    """
    own = confidence(scores, member), correct(scores, member)
    found = _estimate(scores, member, calibration_residuals(*own, num_bins, binning))
    value = calibration_error(*own, num_bins, binning)
    corrected = value if member.deterministic else math.nan
    return Estimate(value, corrected, found.mc_error, found.data_error, found.num_samples)


def entropy(scores: Scores, member: Member) -> Estimate:
    """Entropy of the predictive distribution (nats)."""
    return _estimate(scores, member, scores.curve_of(member).entropy(member.temperature))


def mutual_information(scores: Scores, member: Member) -> Estimate:
    """Entropy of the mean minus mean entropy of the samples."""
    if member.deterministic or member.alpha != 1 or member.temperature != 1:
        raise ScoresError(
            f"mutual information exists for alpha=1 at temperature 1 only, not for {member!r}: "
            "other members are not mixtures of their samples"
        )
    row, _ = scores.index(member)
    mean = scores.curve_of(member).entropy(1.0)
    return _estimate(scores, member, mean - scores.field("sampled", "mean_entropy")[row])


def perplexity(scores: Scores, member: Member) -> Estimate:
    """exp(XE), with errors by the delta method."""
    xe = scores.xe(member)
    value, corrected = (math.inf if v >= 700 else math.exp(v) for v in (xe.value, xe.corrected))
    errors = (value * xe.mc_error, value * xe.data_error)
    return Estimate(value, corrected, *errors, xe.num_samples, corrected * xe.bias_error)


def by_frequency(
    scores: Scores,
    member: Member,
    counts: Tensor,
    bands: Sequence[Band],
    against: Member | None,
) -> list[tuple[Band, int, Estimate | None]]:
    """XE by how often the target's class occurred in training."""
    if counts.shape != (scores.protocol.num_classes,):
        raise ScoresError(
            f"counts of shape {tuple(counts.shape)} must have one entry for each of the "
            f"{scores.protocol.num_classes} classes"
        )
    values, at = scores.values(member), counts[scores.targets]
    values = values if against is None else values.minus(scores.values(against))
    rows: list[tuple[Band, int, Estimate | None]] = []
    for low, high in bands:
        chosen = (at > low) & (at <= high)
        clusters = scores.clusters[chosen].unique(return_inverse=True)[1]
        count, shared = int(chosen.sum()), scores.protocol.shared
        found = estimate(values.part(chosen), clusters, shared=shared) if count else None
        rows.append(((low, high), count, found))
    return rows


def _estimate(scores: Scores, member: Member, values: Tensor) -> Estimate:
    samples = 0 if member.deterministic else scores.num_samples
    return estimate(
        Values(values.to(torch.float64), None, samples),
        scores.clusters,
        shared=scores.protocol.shared,
    )
