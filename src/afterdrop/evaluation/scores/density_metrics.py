"""Metrics of predicted distributions of numbers.

Each is a function of Scores and a member and gives an `Estimate`. As for classes, the halves of the
samples keep log-likelihoods only, so that mask errors of these metrics are not known.

    CRPS          ∫ (F(z) − [z ≥ y])² dz; for a single number the absolute error
    coverage      share of targets inside the central interval of a level: |F(y) − ½| ≤ level/2
    calibration   mean over levels of |share of targets below the quantile − level|
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afterdrop.errors import ScoresError
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.metrics import estimate_of
from afterdrop.evaluation.scores.schema import Results
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import Grid, Member

if TYPE_CHECKING:
    from afterdrop.evaluation.scores.scores import Scores

LEVELS = tuple(i / 20 for i in range(1, 20))  # of the quantiles whose calibration is measured
_WIDTHS = {0.5: "width50_at", 0.9: "width90_at"}


def crps(scores: Scores, member: Member) -> Estimate:
    """Continuous ranked probability score."""
    return estimate_of(scores, member, scores.summary(member, "crps_at"))


def rmse(scores: Scores, member: Member) -> Estimate:
    """Root of the mean squared error of the expected values; errors by the delta method."""
    found = estimate_of(
        scores, member, (scores.summary(member, "mean_at") - scores.targets).square()
    )
    value = math.sqrt(found.value)
    slope = 0.5 / value if value else math.nan
    return dataclasses.replace(
        found,
        value=value,
        corrected=math.sqrt(found.corrected) if found.corrected >= 0 else math.nan,
        mc_error=slope * found.mc_error,
        data_error=slope * found.data_error,
    )


def coverage(scores: Scores, member: Member, level: float) -> Estimate:
    """Share of targets inside the central interval of a level."""
    if not 0 < level < 1:
        raise ScoresError(f"level={level} must lie between 0 and 1, as 0.9")
    inside = (scores.summary(member, "cdf_at") - 0.5).abs() <= level / 2
    return estimate_of(scores, member, inside.double())


def width(scores: Scores, member: Member, level: float) -> Estimate:
    """Mean width of the central interval of a level."""
    if level not in _WIDTHS:
        raise ScoresError(f"level={level}: widths are kept for the levels 0.5 and 0.9")
    return estimate_of(scores, member, scores.summary(member, _WIDTHS[level]))


def quantile_calibration(scores: Scores, member: Member) -> tuple[Tensor, Tensor]:
    """Levels, and the share of targets below the quantile of each."""
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    below = scores.summary(member, "cdf_at").unsqueeze(-1) <= levels
    return levels, below.double().mean(0)


def calibration_error(scores: Scores, member: Member) -> Estimate:
    """Mean over levels of |share of targets below the quantile − level|.

    Its data error holds the signs fixed, so it is too small where the differences are noise.
    """
    levels, shares = quantile_calibration(scores, member)
    below = (scores.summary(member, "cdf_at").unsqueeze(-1) <= levels).double()
    return estimate_of(scores, member, ((below - levels) * (shares - levels).sign()).mean(-1))


def noise_variance(scores: Scores) -> float:
    """The noise variance that temperature 1 stands for, of the squared error."""
    if scores.request.likelihood != "squared_error":
        raise ScoresError(f"{scores.request.likelihood} has no noise variance apart from T")
    if scores.request.noise_variance is not None:
        return scores.request.noise_variance
    error = scores.targets - scores.field("deterministic", "mean_at")[0]
    found, (low, high) = error.square().mean().item(), (scores.protocol.low, scores.protocol.high)
    if not low <= found <= high:
        raise ScoresError(
            f"the mean squared error is {found:g}, but the first batch suggested noise "
            f"variances from {low:g} to {high:g}; evaluate again with "
            f"temperatures=({found / 8:g}, {found * 8:g})"
        )
    return found


def quantile_average(scores: Scores, multiplier: float) -> tuple[Protocol, Results]:
    """Protocol and tensors of the means of quantiles at a multiplier, as a deterministic member."""
    if not scores.has("quantile", "nll_at"):
        name = scores.request.likelihood
        reason = "its likelihood has no `quantile_mean`"
        if name == "squared_error":
            reason = "they are its members of alpha 0"
        elif scores.protocol.has_classes:
            reason = "its targets are classes, not numbers"
        elif not scores.protocol.grid.stochastic:
            reason = "its grid has no multiplier above 0"
        raise ScoresError(f"means of quantiles were not evaluated for {name!r}: {reason}")
    row, _ = scores.index(Member(scores.protocol.grid.alphas[0], multiplier))
    tensors = {name: t for name, t in scores.tensors.items() if name.startswith("data.")}
    for spec in schema.expected(scores.protocol):
        if spec.group == "quantile":
            name = schema.name_of("deterministic", spec.field)
            tensors[name] = scores.field("quantile", spec.field)[row]
    tensors["deterministic.target"] = -tensors["deterministic.nll_at"][-1]
    return scores.protocol.with_grid(Grid((0.0,), (0.0,))), tensors
