"""Estimates from K mask samples: bias correction and the two errors.

Legend: N targets, K samples, x_i per-target value at K, h_i,1 and h_i,2 at K/2 from independent
halves, g clusters of targets: examples, or blocks of a text.

The XE of a K-sample mean is biased upwards by about c/K, which more data does not remove:

    corrected   = 2 x − mean(h_1, h_2)                       the K = ∞ member
    at k        = corrected + (x − corrected) · K/k          what k samples deliver
    mc_error    the error of x from the masks. The halves differ by d_i = h_i,1 − h_i,2, and the
                standard deviation of x is half of that of d: sqrt(Σ_g (Σ_{i∈g} d_i)²)/(2N) for
                masks that are independent between examples, |mean d|/2 if examples share masks.
    data_error  the error from the choice of targets: the spread between clusters, less the
                independent mask noise that it also contains.
"""

import dataclasses
import math

import torch
from torch import Tensor

from afterdrop.errors import MemberError


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over targets with its errors.

    Attributes:
        value: At `num_samples` samples.
        corrected: At infinitely many samples.
        mc_error: Standard error from the masks; NaN with one sample, which does not show it.
        data_error: Standard error from the choice of examples.
        num_samples: K; 0 without masks.

    Example:
        >>> e = Estimate(1.02, corrected=1.0, mc_error=0.003, data_error=0.004, num_samples=100)
        >>> round(e.error, 6), round(e.at(50), 6)
        (0.005, 1.04)
        >>> print(e)
        1.0200 ± 0.0050 (K = 100; corrected 1.0000)
    """

    value: float
    corrected: float
    mc_error: float
    data_error: float
    num_samples: float

    @property
    def error(self) -> float:
        """The root of the sum of both squared errors."""
        return math.hypot(0.0 if math.isnan(self.mc_error) else self.mc_error, self.data_error)

    def at(self, k: float) -> float:
        """The value expected of a predictor with `k` samples."""
        if self.num_samples == 0 or k == self.num_samples or math.isinf(self.value):
            return self.value
        return self.corrected + (self.value - self.corrected) * self.num_samples / _positive(k)

    def __str__(self) -> str:
        masks = f" (K = {self.num_samples:g}; corrected {self.corrected:.4f})" * (
            self.num_samples > 0
        )
        return f"{self.value:.4f} ± {self.error:.4f}{masks}"


@dataclasses.dataclass(frozen=True)
class Values:
    """Per-target values of one member, for estimates and paired differences.

    Attributes:
        whole: [N] at K samples, float64.
        halves: [2, N] at K/2 samples, from the independent halves; None if there are no halves.
        num_samples: K; 0 for the deterministic member.
    """

    whole: Tensor
    halves: Tensor | None
    num_samples: float

    def at(self, k: float | None) -> Tensor:
        """[N] values expected of `k` samples; None stands for K itself, inf for no bias."""
        if self.halves is None or k is None or k == self.num_samples:
            return self.whole
        ratio, halves = self.num_samples / _positive(k), self.halves.mean(0)
        found = self.whole * (2 - ratio) + halves * (ratio - 1)
        # The law does not hold for infinite values: more samples keep the value of all samples,
        # fewer that of the halves.
        return torch.where(found.isfinite(), found, halves if ratio > 1 else self.whole)

    def moved(self, k: float | None) -> "Values":
        """The values extrapolated to `k` samples: whole, halves and number of samples."""
        if self.halves is None or k is None or k == self.num_samples:
            return self
        spread = (self.halves - self.halves.mean(0)).nan_to_num(0.0, 0.0, 0.0)  # of infinite values
        number = self.num_samples if math.isinf(k) else k
        return Values(self.at(k), self.at(k / 2) + spread, number)

    def minus(self, other: "Values", k: float | None = None) -> "Values":
        """Paired differences to another member, at `k` samples."""
        mine, theirs = self.moved(k), other.moved(k)
        number = max(mine.num_samples, theirs.num_samples)
        if mine.halves is None and theirs.halves is None:
            return Values(mine.whole - theirs.whole, None, number)
        halves = (v.whole if v.halves is None else v.halves for v in (mine, theirs))
        return Values(mine.whole - theirs.whole, next(halves) - next(halves), number)


def _positive(k: float) -> float:
    if not k > 0:
        raise MemberError(f"k={k} must be a positive number of samples")
    return k


def cluster_sums(values: Tensor, clusters: Tensor) -> Tensor:
    """Sums of the last dimension by cluster number (0, 1, ...)."""
    groups = int(clusters.max()) + 1 if clusters.numel() else 0
    sums = values.new_zeros((*values.shape[:-1], groups))
    return sums.index_add_(-1, clusters, values)


def mc_error(values: Values, clusters: Tensor, *, shared: bool) -> float:
    """Standard error of the mean of `values` from the masks."""
    if values.num_samples == 0:
        return 0.0
    if values.halves is None:
        return math.nan
    difference = values.halves[0] - values.halves[1]
    if shared:
        return difference.mean().abs().item() / 2
    return cluster_sums(difference, clusters).square().sum().sqrt().item() / (2 * len(clusters))


def clustered_error(values: Tensor, clusters: Tensor) -> float:
    """Standard error of a mean over clustered targets."""
    sums = cluster_sums(values - values.mean(), clusters)
    groups = len(sums)
    if groups < 2:
        return math.nan
    return sums.square().sum().mul(groups / (groups - 1)).sqrt().item() / len(values)


def estimate(values: Values, clusters: Tensor, *, shared: bool) -> Estimate:
    """The mean of per-target values with both errors.

    Args:
        values: Per-target values.
        clusters: [N] the number of each target's example or block of text.
        shared: Whether examples share masks.

    Example:
        >>> import torch
        >>> v = Values(torch.tensor([1.0, 3.0], dtype=torch.float64), None, 0)
        >>> print(estimate(v, torch.tensor([0, 1]), shared=False))
        2.0000 ± 1.0000
    """
    masks = mc_error(values, clusters, shared=shared)
    total = clustered_error(values.whole, clusters)
    own = 0.0 if shared or math.isnan(masks) else masks
    data = math.sqrt(max(0.0, total**2 - own**2)) if math.isfinite(total) else total
    return Estimate(
        values.whole.mean().item(),
        values.at(math.inf).mean().item(),
        masks,
        data,
        values.num_samples,
    )
