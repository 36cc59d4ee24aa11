"""Calibration of confidences: expected calibration error, and risk against coverage.

ECE = Σ_bins (n_bin/N) · |accuracy in the bin − mean confidence in the bin|
risk(c) = share of errors among the share c of predictions with the highest confidence
"""

from typing import Literal

import torch
from torch import Tensor

from afterdrop.errors import MemberError

Binning = Literal["width", "mass"]


def assign_bins(confidence: Tensor, num_bins: int, binning: Binning) -> Tensor:
    """[N] the bin of each target.

    Raises:
        MemberError: If there is no bin, or no such binning.
    """
    if num_bins < 1:
        raise MemberError(f"num_bins={num_bins} must be at least 1")
    if binning == "width":
        return (confidence * num_bins).ceil().long().sub_(1).clamp_(0, num_bins - 1)
    if binning == "mass":
        # Equal confidences share a bin, that of the middle of their ranks: which of them is in a
        # bin must not depend on the order of the targets.
        _, group, size = confidence.unique(return_inverse=True, return_counts=True)
        middle = size.cumsum(0) * 2 - size - 1  # twice the middle rank
        return (middle * num_bins).div(2 * len(confidence), rounding_mode="floor")[group]
    raise MemberError(f"binning={binning!r} must be 'width' or 'mass'")


def calibration_bins(
    confidence: Tensor, correct: Tensor, num_bins: int = 15, binning: Binning = "width"
) -> tuple[Tensor, Tensor, Tensor]:
    """Per bin: share of the targets, mean confidence and accuracy (0 in empty bins).

    Args:
        confidence: [N] probability of the predicted class.
        correct: [N] whether the prediction was right.
        num_bins: Number of bins.
        binning: "width" divides (0, 1] into equal intervals, "mass" the sorted targets into equal
            counts, where equal confidences stay together.
    """
    bins = assign_bins(confidence, num_bins, binning)
    counts = torch.zeros(num_bins, dtype=torch.float64)
    sums = [torch.zeros(num_bins, dtype=torch.float64) for _ in range(2)]
    counts.index_add_(0, bins, torch.ones_like(confidence, dtype=torch.float64))
    for total, values in zip(sums, (confidence, correct)):
        total.index_add_(0, bins, values.double())
    full = counts.clamp_min(1.0)
    return counts / len(confidence), sums[0] / full, sums[1] / full


def calibration_error(
    confidence: Tensor, correct: Tensor, num_bins: int = 15, binning: Binning = "width"
) -> float:
    """Expected calibration error.

    Example:
        >>> calibration_error(torch.tensor([0.8, 0.8]), torch.tensor([True, False]))
        0.30000001192092896
    """
    share, confident, accurate = calibration_bins(confidence, correct, num_bins, binning)
    return (share * (confident - accurate).abs()).sum().item()


def calibration_residuals(
    confidence: Tensor, correct: Tensor, num_bins: int = 15, binning: Binning = "width"
) -> Tensor:
    """[N] values whose mean is the expected calibration error, for its error.

    Confidence minus correctness of each target, with the sign of its bin's gap: with bins and signs
    held fixed, the calibration error is a mean over targets.

    Example:
        >>> calibration_residuals(torch.tensor([0.8, 0.8]), torch.tensor([True, False]))
        tensor([-0.2000,  0.8000])
    """
    bins = assign_bins(confidence, num_bins, binning)
    _, confident, accurate = calibration_bins(confidence, correct, num_bins, binning)
    sign = (confident - accurate).sign()[bins].to(confidence.dtype)
    return sign * (confidence - correct.to(confidence.dtype))


def risk_coverage(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Coverage and risk if predictions below a confidence are rejected, in order of coverage.

    Equal confidences are kept or rejected together, so the curve has one point per distinct
    confidence and does not depend on the order of the targets.

    Args:
        confidence: [N] probability of the predicted class.
        correct: [N] whether the prediction was right.

    Returns:
        Coverage and risk, one entry per distinct confidence; the last one keeps every prediction.

    Example:
        >>> right = torch.tensor([True, False, True, True])
        >>> coverage, risk = risk_coverage(torch.tensor([0.9, 0.6, 0.9, 0.7]), right)
        >>> coverage.tolist(), risk.tolist()
        ([0.5, 0.75, 1.0], [0.0, 0.0, 0.25])
    """
    ordered, order = confidence.sort(descending=True, stable=True)
    wrong = (~correct.bool())[order].double().cumsum(0)
    kept = torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    last = torch.ones(len(ordered), dtype=torch.bool)
    last[:-1] = ordered[:-1] != ordered[1:]
    return kept[last] / len(ordered), (wrong / kept)[last]
