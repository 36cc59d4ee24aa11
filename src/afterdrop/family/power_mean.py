"""Power means of probabilities in log space: of all samples at once, and streaming over samples.

Legend: K samples, N targets, V classes; `lp` log p_k(c). Everything is float32 or better.

Two forms of log M_α = (1/α) log mean_k exp(α lp_k), with m the maximum over samples:

    power sums   m + (log Σ_k exp(α (lp_k − m)) − log K) / α
    shifted      m + log1p(mean_k expm1(α (lp_k − m))) / α       exact as α → 0

The first form divides the rounding error of the logarithm by α (0.5 nats at α = 1e-6 in float32).
The shifted form does not, but it cancels when the mean of exp(..) is tiny, that is when α times the
spread of lp is large. `SMALL_ALPHA` separates them: below it that spread would have to exceed 100
nats.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.family.exponential import exp_times
from afterdrop.family.member import GEOMETRIC, check_alpha

SMALL_ALPHA = 0.125  # smaller powers use the shifted form
_SLICE = 2**19  # elements added at a time: 2 MiB of float32 stay in the cache
PLAIN_FROM = -80.0  # smallest α · lp that plain sums can hold: float32 ends at exp(−87)
LOWEST = -1e30  # a finite peak in place of −inf: −inf − LOWEST is −inf, −inf − (−inf) is NaN


def log_power_mean(
    log_probs: Tensor, alpha: float, dim: int = 0, *, bounded: bool = True
) -> Tensor:
    """Log of the power mean of probabilities over `dim`, not normalised.

    Exact and continuous at alpha = 0, where it is the mean of the log-probabilities (the log of
    the geometric mean). Probabilities of zero (−inf) are allowed.

    Args:
        log_probs: Log-probabilities, any shape.
        alpha: Power of the mean in [0, 1].
        dim: The dimension of the samples.
        bounded: Whether to reject powers outside [0, 1], for which dropout training gives no bound.

    Returns:
        The log power mean, without `dim`; float64 for float64 input, otherwise float32.

    Example:
        >>> lp = torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()
        >>> log_power_mean(lp, 1).exp()
        tensor([0.3000, 0.7000])
        >>> log_power_mean(lp, 0).exp().sum() < 1
        tensor(True)
    """
    alpha = check_alpha(alpha, bounded=bounded)
    if not log_probs.is_floating_point() or log_probs.dim() == 0 or log_probs.shape[dim] == 0:
        raise DataError(
            f"log_probs of shape {tuple(log_probs.shape)} and {log_probs.dtype} has no samples to "
            f"average over dim={dim}; give floating point log-probabilities"
        )
    if log_probs.dtype != torch.float64:
        log_probs = log_probs.float()
    if alpha == 0:
        return log_probs.mean(dim)
    if alpha == 1:
        return log_probs.logsumexp(dim) - math.log(log_probs.shape[dim])
    # Relative to the largest term every exponent is at most 0: the maximum, or the minimum if
    # α < 0.
    peak = log_probs.amax(dim, keepdim=True) if alpha > 0 else log_probs.amin(dim, keepdim=True)
    peak = peak.clamp_min(LOWEST)
    exponent = (log_probs - peak).mul_(alpha)
    if abs(alpha) < SMALL_ALPHA:
        shifted = exponent.expm1_().mean(dim).log1p_()
    else:
        shifted = exponent.exp_().mean(dim).log_()
    return shifted.div_(alpha).add_(peak.squeeze(dim))


class PowerSums:
    """Streaming log power means over samples, for several alphas at once.

    Each alpha holds the sum of exp(α (lp − peak)), of expm1 below `SMALL_ALPHA`, and of lp itself
    at 0. On a CPU the peak is 0 as long as no α · lp is below `PLAIN_FROM`; after that, and on
    other devices, it is the running maximum over samples, which takes twice as long. `add` takes
    chunks of samples and `merge` another state: however the samples are split, the result is that
    of `log_power_mean` over all of them. Alphas that are multiples of the smallest one cost a
    multiplication instead of an exponential.

    Args:
        alphas: Powers of the mean, at least 0. (The second moment at alpha is the power 2 α.)
        entropy: Whether to sum the entropies of the samples over the last dimension; needs
            alpha 1.

    Example:
        >>> lp = torch.randn(6, 4).log_softmax(-1)
        >>> sums = PowerSums((0.0, 0.5))
        >>> for chunk in lp.split(2):
        ...     sums.add(chunk)
        >>> torch.allclose(sums.log_mean(0.5), log_power_mean(lp, 0.5), atol=1e-6)
        True
    """

    def __init__(self, alphas: tuple[float, ...], *, entropy: bool = False) -> None:
        self.alphas = tuple(sorted(alphas))
        self.count = 0
        self.peak: Tensor | None = None  # None stands for 0
        self.totals: dict[float, Tensor] = {}
        self.entropy: Tensor | None = None
        self._wants_entropy = entropy

    def add(self, lp_K: Tensor) -> None:
        """Adds samples along dimension 0."""
        if not self.totals:
            shape = lp_K.shape[1:]
            self.totals = {alpha: lp_K.new_zeros(shape) for alpha in self.alphas}
            self.entropy = lp_K.new_zeros(shape[:-1]) if self._wants_entropy else None
            # expm1 needs a peak near its argument, and reading the lowest value of a GPU tensor
            # would wait for the GPU.
            if lp_K.device.type != "cpu" or any(GEOMETRIC <= a < SMALL_ALPHA for a in self.alphas):
                self._start_peaks()
        if lp_K.numel() <= _SLICE or lp_K.dim() < 3:
            self._add_slice(lp_K, ())
        else:  # in slices of targets that stay in the cache
            rows = lp_K.shape[-2]
            step = max(1, _SLICE // (lp_K.shape[0] * lp_K.shape[-1]))
            for lead in itertools.product(*map(range, lp_K.shape[1:-2])):
                for start in range(0, rows, step):
                    self._add_slice(lp_K, (*lead, slice(start, start + step)))
        self.count += lp_K.shape[0]

    def _add_slice(self, lp_K: Tensor, at: tuple[Any, ...]) -> None:
        lp_K = lp_K[(slice(None), *at)]
        below = self._below(lp_K, at)
        powers: dict[float, Tensor] = {}
        for alpha in self.alphas:
            if alpha < GEOMETRIC:
                terms = lp_K
            elif alpha < SMALL_ALPHA:
                terms = (below * alpha).expm1_()
            else:
                terms = powers[alpha] = _power(below, alpha, powers)
            self.totals[alpha][at] += terms.sum(0)
        if self.entropy is None:
            return
        if self.peak is None:
            self.entropy[at] -= torch.linalg.vecdot(powers[1.0], lp_K).sum(0)
        else:
            # −Σ p log p with p = e^peak · e^(lp − peak); where p is 0, so is p log p.
            peak = self.peak[at]
            information = below.clamp_min_(LOWEST).add_(peak).mul_(powers[1.0]).sum(0)
            self.entropy[at] -= information.mul_(peak.exp()).sum(-1)

    def _below(self, lp_K: Tensor, at: tuple[Any, ...]) -> Tensor:
        """Samples relative to the peak of their slice, which is raised to their maximum."""
        if self.peak is None and self._plain_holds(lp_K):
            return lp_K
        peak = torch.maximum(lp_K.amax(0), self._start_peaks()[at])
        self._move_peak(peak, at)
        return lp_K - peak

    def _plain_holds(self, lp_K: Tensor) -> bool:
        return not lp_K.numel() or float(lp_K.amin()) * self.alphas[-1] >= PLAIN_FROM

    def merge(self, other: "PowerSums") -> None:
        """Adds all samples of another state of the same alphas, which must not be used after."""
        if not other.totals:
            return
        if not self.totals:
            self.peak, self.totals, self.entropy = other.peak, other.totals, other.entropy
            self.count = other.count
            return
        if self.peak is not None or other.peak is not None:
            peak = torch.maximum(self._start_peaks(), other._start_peaks())
            self._move_peak(peak)
            other._move_peak(peak)
        for alpha in self.alphas:
            self.totals[alpha] += other.totals[alpha]
        if self.entropy is not None and other.entropy is not None:
            self.entropy += other.entropy
        self.count += other.count

    def select(self, dim: int, index: Tensor) -> None:
        """Keeps some entries of a dimension of the sums, which is one less than in `add`."""
        self.totals = {alpha: x.index_select(dim, index) for alpha, x in self.totals.items()}
        self.peak = None if self.peak is None else self.peak.index_select(dim, index)
        self.entropy = None if self.entropy is None else self.entropy.index_select(dim, index)

    def log_mean(self, alpha: float) -> Tensor:
        """The log power mean of everything added so far."""
        if not self.totals:
            raise DataError("no samples were added; call add before log_mean")
        mean = self.totals[alpha] / self.count
        if alpha < GEOMETRIC:
            return mean
        shifted = (mean.log1p_() if alpha < SMALL_ALPHA else mean.log_()).div_(alpha)
        return shifted if self.peak is None else shifted.add_(self.peak)

    def _start_peaks(self) -> Tensor:
        """Makes plain sums relative to a peak, which comes from the sum of the largest power."""
        if self.peak is None:
            top = self.alphas[-1]
            self.peak = torch.full_like(self.totals[top], LOWEST)
            if top >= SMALL_ALPHA:
                torch.maximum(self.peak, self.totals[top].log().div_(top), out=self.peak)
                held = self.peak.clamp_min(PLAIN_FROM / top)  # a sum of 0 stays 0
                for alpha in self.alphas:
                    if alpha >= SMALL_ALPHA:
                        self.totals[alpha] *= exp_times(held, -alpha)
        return self.peak

    def _move_peak(self, peak: Tensor, at: tuple[Any, ...] = ()) -> None:
        """Rescales the sums of a slice to a higher peak."""
        assert self.peak is not None
        down = self.peak[at] - peak
        powers: dict[float, Tensor] = {}
        for alpha in self.alphas if self.count else ():
            total = self.totals[alpha][at]
            if alpha < GEOMETRIC:
                continue
            if alpha < SMALL_ALPHA:  # Σ expm1(a + d) = Σ expm1(a)·e^d + count·expm1(d)
                shrink = (down * alpha).expm1_()
                total.addcmul_(total, shrink).add_(shrink, alpha=self.count)
            else:
                powers[alpha] = _power(down, alpha, powers)
                total.mul_(powers[alpha])
        self.peak[at] = peak


def _power(below: Tensor, alpha: float, known: dict[float, Tensor]) -> Tensor:
    """exp(α · below), as the product of two known powers if they exist."""
    for other, term in known.items():
        if alpha - other in known:
            return term * known[alpha - other]
    return exp_times(below, alpha)
