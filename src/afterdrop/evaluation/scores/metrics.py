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
from afterdrop.family import presentation
from afterdrop.family.calibration import Binning, calibration_error, calibration_residuals
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import Member

if TYPE_CHECKING:
    from afterdrop.evaluation.scores.scores import Scores

Band = tuple[float, float]


def correct(scores: Scores, member: Member) -> Tensor:
    """[N] whether each target is the most probable class."""
    return scores.class_curve(member).predicted(member.temperature) == scores.targets


def confidence(scores: Scores, member: Member) -> Tensor:
    """[N] probability of the most probable class."""
    return scores.class_curve(member).log_confidence(member.temperature).exp()


def accuracy(scores: Scores, member: Member) -> Estimate:
    """Share of targets that are the most probable class."""
    return estimate_of(scores, member, correct(scores, member).double())


def brier(scores: Scores, member: Member) -> Estimate:
    """Mean of `brier_losses`."""
    return estimate_of(scores, member, brier_losses(scores, member))


def brier_losses(scores: Scores, member: Member) -> Tensor:
    """[N] Σ_c (p(c) − [c = y])² of each target; of labels (p(1) − y)², half of that."""
    p = (-scores.values(member).whole).exp()
    square = scores.class_curve(member).log_square(member.temperature).exp()
    share = 1.0 if scores.request.likelihood == "categorical" else 0.5
    return share * (1 - 2 * p + square)


def xe_per_example(scores: Scores, member: Member) -> Estimate:
    """Mean over examples of the sum of an example's cross entropies."""
    xe, each = scores.xe(member), scores.num_targets / scores.num_examples
    return Estimate(
        each * xe.value,
        each * xe.corrected,
        each * xe.mc_error,
        each * xe.data_error,
        xe.num_samples,
        each * xe.bias_error,
    )


def ece(scores: Scores, member: Member, num_bins: int, binning: Binning) -> Estimate:
    """Expected calibration error.

    Its data error holds the bins and the sign of each bin's gap fixed, so it is too small where
    gaps are not larger than their noise.
    """
    own = confidence(scores, member), correct(scores, member)
    found = estimate_of(scores, member, calibration_residuals(*own, num_bins, binning))
    value = calibration_error(*own, num_bins, binning)
    corrected = value if member.deterministic else math.nan
    return Estimate(value, corrected, found.mc_error, found.data_error, found.num_samples)


def entropy(scores: Scores, member: Member) -> Estimate:
    """Entropy of the predictive distribution (nats)."""
    return estimate_of(scores, member, _entropy(scores, member))


def _entropy(scores: Scores, member: Member) -> Tensor:
    if scores.protocol.has_classes:
        return scores.class_curve(member).entropy(member.temperature)
    return scores.summary(member, "entropy_at")


def mutual_information(scores: Scores, member: Member) -> Estimate:
    """Entropy of the mean minus mean entropy of the samples."""
    if member.deterministic or member.alpha != 1 or member.temperature != 1:
        raise ScoresError(
            f"mutual information exists for alpha=1 at temperature 1 only, not for {member!r}: "
            "other members are not mixtures of their samples"
        )
    row, _ = scores.index(member)
    mean = _entropy(scores, member)
    return estimate_of(scores, member, mean - scores.field("sampled", "mean_entropy")[row])


def perplexity(scores: Scores, member: Member) -> Estimate:
    """exp(XE), with errors by the delta method."""
    xe = scores.xe(member)
    value, corrected = (presentation.perplexity(nats) for nats in (xe.value, xe.corrected))
    errors = (value * xe.mc_error, value * xe.data_error)
    return Estimate(value, corrected, *errors, xe.num_samples, corrected * xe.bias_error)


def by_frequency(
    scores: Scores,
    member: Member,
    counts: Tensor,
    bands: Sequence[Band],
    against: Member | None,
) -> list[tuple[Band, int, Estimate | None]]:
    """XE by how often the target's class, or its label, occurred in training."""
    if not scores.protocol.has_classes:
        raise ScoresError("numbers have no classes whose frequency could be counted")
    kinds, size = scores.kinds, scores.num_kinds
    what = "labels" if scores.has("data", "labels") else "classes"
    if counts.shape != (size,):
        raise ScoresError(
            f"counts of shape {tuple(counts.shape)} must have one entry for each of the {size} "
            f"{what}"
        )
    values, at = scores.values(member), counts[kinds]
    values = values if against is None else values.minus(scores.values(against))
    rows: list[tuple[Band, int, Estimate | None]] = []
    for low, high in bands:
        chosen = (at > low) & (at <= high)
        clusters = scores.clusters[chosen].unique(return_inverse=True)[1]
        count, shared = int(chosen.sum()), scores.protocol.shared
        found = estimate(values.part(chosen), clusters, shared=shared) if count else None
        rows.append(((low, high), count, found))
    return rows


def estimate_of(scores: Scores, member: Member, values: Tensor) -> Estimate:
    """The mean of per-target values [N] of a member, without a mask error."""
    samples = 0 if member.deterministic else scores.num_samples
    return estimate(
        Values(values.to(torch.float64), None, samples),
        scores.clusters,
        shared=scores.protocol.shared,
    )
