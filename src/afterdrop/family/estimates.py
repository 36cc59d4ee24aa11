"""Estimates from K mask samples: bias correction and the two errors.

Legend: N targets, K samples, x_i per-target value at K, h_i,1 and h_i,2 at K/2 from independent
halves, g clusters of targets: examples, or blocks of a text.

The XE of a K-sample mean is biased upwards by about c/K, which more data does not remove:

    corrected   = 2 x − mean(h_1, h_2)                       the K = ∞ member
    at k        = corrected + (x − corrected) · K/k          what k samples deliver
    bias_error  how far `corrected` may be off because the bias does not fall as 1/K. It does where
                halves differ little. Where they differ by more than 1 nat, a few samples decide
                about a target, and the correction of such targets counts as unknown. Estimates
                from a quarter of the samples, where there are any, test the law itself.
    mc_error    the error of x from the masks. By definition x = mean(h_1, h_2) + c, where c is what
                only all samples together show. The error of the mean of two independent halves
                follows from their difference d_i = h_i,1 − h_i,2: sqrt(Σ_g (Σ_{i∈g} d_i)²)/(2N) for
                masks that are independent between examples, |mean d|/2 if examples share masks.
                That of c is at most its spread between clusters, which exists only in the first
                case; both are added as independent errors. They are not if few samples decide.
                This matters for two alphas of one multiplier, which differ by what the samples'
                variance makes of them: K samples show the share 1 − 1/K of a variance that few of
                them make up, halves 1 − 2/K. Such differences have the error of the mean of their
                halves multiplied by (K − 1)/(K − 2), which is too much for normal samples.
    data_error  the error from the choice of targets: the spread between clusters, less the
                independent mask noise that it also contains.

Two halves are the smallest case of a jackknife that leaves out one of G groups of samples, of m of
the K samples each. With x_-g the value without group g,

    h_g         = x + (K − m)/m · (x_-g − x)                 G = 2: the other half
    mean(h_g)   is the value at K/2 by the law c/K, so all formulas above hold with it
    mc_error    = sqrt(Σ_g (h_g − mean h)²/(G (G − 1)))      the jackknife's; G = 2: as above

A few given samples, such as the models of an ensemble, have one group each: that error has K − 1
degrees of freedom, where two halves have one.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import MemberError
from afterdrop.family.member import Member

_LARGE = 1.0  # nats between the halves of a target from which the law c/K is not trusted
_SLOWEST = 1.2  # smallest ratio of successive steps (2 by the law) that is extrapolated


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over targets with its errors.

    Attributes:
        value: At `num_samples` samples.
        corrected: At infinitely many samples; NaN where the halves of the samples do not show it
            (metrics other than XE, one sample).
        mc_error: Standard error from the masks; NaN where it is not known, as with one sample.
        data_error: Standard error from the choice of examples; NaN with a single example.
        num_samples: K; 0 without masks.
        bias_error: How far `corrected` may be off because the bias does not fall as 1/K.

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
    bias_error: float = 0.0

    @property
    def error(self) -> float:
        """The root of the sum of both squared errors."""
        return math.hypot(0.0 if math.isnan(self.mc_error) else self.mc_error, self.data_error)

    def at(self, k: float) -> float:
        """The value expected of a predictor with `k` samples; NaN where K does not tell."""
        if self.num_samples == 0 or k == self.num_samples or math.isinf(self.value):
            return self.value
        return self.corrected + (self.value - self.corrected) * self.num_samples / _positive(k)

    def error_at(self, k: float) -> float:
        """The error of `at(k)`: that of the value, and that of the law by which it was moved."""
        if self.num_samples == 0 or k == self.num_samples:
            return self.error
        return math.hypot(self.error, self.bias_error * (1 - self.num_samples / _positive(k)))

    def __str__(self) -> str:
        text = f"{self.value:.4f} ± {self.error:.4f}"
        if math.isnan(self.error):
            text = f"{self.value:.4f} (error unknown)"
        if self.num_samples == 0:
            return text
        limit = ""
        if not math.isnan(self.corrected):
            limit = f"; corrected {self.corrected:.4f}"
            if self.bias_error > self.error / 2:
                limit += f" ± {self.error_at(math.inf):.4f}, as the bias does not fall as 1/K"
        return f"{text} (K = {self.num_samples:g}{limit})"


@dataclasses.dataclass(frozen=True)
class Values:
    """Per-target values of one member, for estimates and paired differences.

    Attributes:
        whole: [N] at K samples, float64.
        halves: [G, N] at K/2 samples, from the independent halves (G = 2) or by the jackknife over
            G groups; None if there are neither.
        num_samples: K; 0 for the deterministic member.
        floor: Their mean cannot be lower, whatever is extrapolated: 0 for XE of classes.
        quarters: [N] at K/4 samples; None if they were not kept.
        member: Whose values these are, if they are one member's.
        moved_error: Error of the mean from an earlier move to another number of samples.
        mc_factor: What the error of the mean of the halves has to be multiplied by; NaN if the
            halves do not show it.
        drawn: Samples that halves were taken from, if values were moved to another number.
        excess: [N] what `whole` adds to the mean of independent halves, if values were moved; None
            if it is the difference of the two.
    """

    whole: Tensor
    halves: Tensor | None
    num_samples: float
    floor: float = -math.inf
    quarters: Tensor | None = None
    member: Member | None = None
    moved_error: float = 0.0
    mc_factor: float = 1.0
    drawn: float | None = None
    excess: Tensor | None = None

    def at(self, k: float | None) -> Tensor:
        """[N] values expected of `k` samples; None stands for K itself, inf for no bias.

        NaN where K samples do not tell: those of a member that keeps no halves.
        """
        if self.num_samples == 0 or k is None or k == self.num_samples:
            return self.whole
        ratio = self.num_samples / _positive(k)
        if self.halves is None:
            return torch.full_like(self.whole, math.nan)
        halves = self.halves.mean(0)
        found = self.whole * (2 - ratio) + halves * (ratio - 1)
        # The law does not hold for infinite values: more samples keep the value of all samples,
        # fewer that of the halves.
        found = torch.where(found.isfinite(), found, halves if ratio > 1 else self.whole)
        now, then = self.whole.mean(), found.mean()
        if then < self.floor < now:  # the law fails: move only as far as values can be
            share = (1 - 1e-9) * (now - self.floor) / (now - then)  # not even by rounding lower
            found = self.whole + share * (found - self.whole)
        return found

    def moved(self, k: float | None) -> "Values":
        """The values extrapolated to `k` samples: whole, halves and number of samples."""
        if self.halves is None or k is None or k == self.num_samples:
            return self
        spread = (self.halves - self.halves.mean(0)).nan_to_num(0.0, 0.0, 0.0)  # of infinite values
        ratio = self.num_samples / k
        error = abs(1 - ratio) * bias_error(self)
        return dataclasses.replace(
            self,
            whole=self.at(k),
            halves=self.at(k / 2) + spread,
            num_samples=self.num_samples if math.isinf(k) else k,
            quarters=None,
            moved_error=math.hypot(self.moved_error, error),
            drawn=self.drawn or self.num_samples,
            excess=(2 - ratio) * self.beyond_halves().nan_to_num(0.0, 0.0, 0.0),
        )

    def beyond_halves(self) -> Tensor:
        """[N] what all samples show beyond the mean of independent halves: c in the legend."""
        if self.excess is not None:
            return self.excess
        if self.halves is None or len(self.halves) > 2:
            return torch.zeros_like(self.whole)  # the jackknife's error contains it
        return self.whole - self.halves.mean(0)

    def minus(self, other: "Values", k: float | None = None) -> "Values":
        """Paired differences to another member, at `k` samples."""
        mine, theirs = self.moved(k), other.moved(k)
        number = max(mine.num_samples, theirs.num_samples)
        whole, halves, quarters = mine.whole - theirs.whole, None, None
        if mine.halves is not None or theirs.halves is not None:
            first, second = (v.whole if v.halves is None else v.halves for v in (mine, theirs))
            halves = first - second
        if mine.quarters is not None or theirs.quarters is not None:
            first, second = (v.whole if v.quarters is None else v.quarters for v in (mine, theirs))
            quarters = first - second
        return Values(
            whole,
            halves,
            number,
            quarters=quarters,
            moved_error=math.hypot(mine.moved_error, theirs.moved_error),
            mc_factor=_variance_factor(self, other),
            excess=mine.beyond_halves() - theirs.beyond_halves(),
        )

    def part(self, chosen: Tensor) -> "Values":
        """The values of some targets [N] (a mask or numbers)."""
        kept: dict[str, Any] = {
            name: None if values is None else values[..., chosen]
            for name, values in vars(self).items()
            if name in ("whole", "halves", "quarters", "excess")
        }
        return dataclasses.replace(self, **kept)


def _variance_factor(mine: Values, theirs: Values) -> float:
    """What the halves of a difference between two alphas of one multiplier lack; NaN at K = 2.

    The jackknife over more than two groups lacks nothing: it errs to the safe side.
    """
    a, b = mine.member, theirs.member
    if a is None or b is None or a.multiplier != b.multiplier or a.alpha == b.alpha:
        return 1.0
    k = mine.drawn or mine.num_samples
    if mine.halves is not None and len(mine.halves) > 2:
        return 1.0
    return (k - 1) / (k - 2) if k > 2 else math.nan


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
    spread = _spread(values.halves) * values.mc_factor
    if shared or not clusters.any():  # a single cluster shows no spread either
        found = spread.mean(-1).square().sum().sqrt().item()
    else:
        halves = cluster_sums(spread, clusters).square().sum().sqrt().item() / len(clusters)
        found = math.hypot(halves, clustered_error(values.beyond_halves(), clusters))
    return math.hypot(found, values.moved_error)


def _spread(halves: Tensor) -> Tensor:
    """Rows [G, N], or one of two halves, whose sum of squares is the variance of the mean of G."""
    if len(halves) == 2:
        return (halves[:1] - halves[1:]) / 2
    return (halves - halves.mean(0)) / math.sqrt(len(halves) * (len(halves) - 1))


def bias_error(values: Values) -> float:
    """How far the mean at infinitely many samples may be off because the law c/K fails."""
    if values.halves is None:
        return 0.0
    halves = values.halves.mean(0)
    step = halves - values.whole
    large = 2 * _spread(values.halves).square().sum(0).sqrt() > _LARGE
    unknown = step[large & step.isfinite()].sum().abs().item() / max(1, len(step))
    if values.quarters is None:
        return unknown
    # By the law each step is half of the one before. If it is 1/r of it, the remaining steps add
    # up to step/(r − 1) instead of to one step.
    before, now = (values.quarters - halves).mean().item(), step.mean().item()
    if not (now > 0 and math.isfinite(before)):
        return unknown
    ratio = max(_SLOWEST, before / now)
    return max(unknown, abs(now / (ratio - 1) - now))


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
        value=values.whole.mean().item(),
        corrected=max(values.at(math.inf).mean().item(), values.floor),
        mc_error=masks,
        data_error=data,
        num_samples=values.num_samples,
        bias_error=bias_error(values),
    )
