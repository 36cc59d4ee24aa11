"""Whether two sets of samples have the same mean and variance.

Samples are compared in pairs of one of each set. If both sets have the same distribution,
exchanging the two samples of a pair changes nothing. The differences d_k between them, of the
values or of their squared distances to the common mean, then have random signs, and

    z = sum_k d_k / sqrt(sum_k d_k²),    P(|z| > b) <= 2 exp(-b² / 2)    (Hoeffding's inequality),

for any number of samples and any distribution. z is the difference of the two means in its
standard errors, estimated on the assumption that the means are equal.

Legend: K samples, N targets, V classes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

FALSE_ALARM = 1e-3  # the probability that equal distributions are found to differ
_LOWEST = -1e4  # log-probabilities of impossible classes may be infinite


class Agreement(NamedTuple):
    """How far the means and variances of two sets of samples are apart.

    Attributes:
        mean: Largest |z| of the means.
        variance: Largest |z| of the variances.
        bound: What both stay below, with a probability of 1 − `FALSE_ALARM`.
        comparisons: The number of comparisons.
    """

    mean: float
    variance: float
    bound: float
    comparisons: int

    @property
    def holds(self) -> bool:
        """Whether neither means nor variances differ."""
        return self.mean <= self.bound and self.variance <= self.bound


def compare(samples: Tensor, others: Tensor, rounding: float) -> Agreement:
    """Compares the means and variances of samples [K, N, V], of each entry and over all entries.

    Args:
        samples: Of one set.
        others: Of the other, as many.
        rounding: Relative differences of this size do not count.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(2, 200, 3, 4)
        >>> compare(x, y, 1e-6).holds, compare(x, y + 1, 1e-6).holds, compare(x, 3 * y, 1e-6).holds
        (True, False, False)
    """
    x, y = (s.double().flatten(1).clamp_min(_LOWEST) for s in (samples, others))
    # Common to both sets, so that exchanging the samples of a pair changes neither.
    center = (x.mean(0) + y.mean(0)) / 2
    x, y = x - center, y - center
    scale = ((x.square().mean(0) + y.square().mean(0)) / 2).sqrt()
    small = rounding * (1 + center.abs())
    means = _z(x - y, small)
    variances = _z(x.square() - y.square(), small * (2 * scale + small))
    # Over all entries, a difference that each of them shows weakly is seen much better.
    scale = scale + small
    x, y = x / scale, y / scale
    total = (small / scale).mean()
    all_means = _z((x - y).mean(1, keepdim=True), total)
    all_variances = _z((x.square() - y.square()).mean(1, keepdim=True), total * (2 + total))
    comparisons = 2 * (x.shape[1] + 1)
    return Agreement(
        max(means, all_means),
        max(variances, all_variances),
        bound(comparisons),
        comparisons,
    )


def bound(comparisons: int) -> float:
    """What |z| stays below in all comparisons, with a probability of 1 − `FALSE_ALARM`."""
    return math.sqrt(2 * math.log(2 * comparisons / FALSE_ALARM))


def fewest_samples(comparisons: int) -> int:
    """The number of samples from which |z| <= sqrt(K) can be well beyond its bound."""
    return 2 * math.ceil(bound(comparisons) ** 2)


def _z(differences: Tensor, small: Tensor) -> float:
    """Largest |z| of differences [K, ...]; the denominator contains rounding."""
    power = (differences.square() + small.square()).sum(0)
    return (differences.sum(0).abs() / power.sqrt()).max().item()
