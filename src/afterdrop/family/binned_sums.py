"""Σ_c exp(b δ_c) over many classes at many b at once, with classes of nearly equal δ in one bin.

The bin of a float is its exponent and the first 6 bits of its fraction. That gives 64 bins per
octave of −δ, each at most 1/64 of δ wide, without a logarithm. With d = δ − the middle of the bin,

    Σ_c exp(b δ_c)  ≈  Σ_bins e^(b middle) · (n + b Σ d + b²/2 Σ d² + b³/6 Σ d³)

is one matrix product of the moments of the bins with a table for every b. Σ d³ is derived from the
other three moments as if the classes of a bin were symmetric around their mean, which is exact
where they are equal. The error is below (b δ/128)⁴/24 of a class's own term e^(b δ), and
0.13 (b δ/128)³ of it in the worst bin, whose classes form two clusters: at b δ = −10 that is 6e-5
of terms that are themselves e^(−10).

Legend: N targets, V classes, J inverse temperatures b; δ = log M − max, at most 0.
"""

import torch
from torch import Tensor

from afterdrop.family.exponential import exp_times

_SHIFT = 17  # drops all but the first 6 of the 23 bits of a float32's fraction
_NEAR = 1e-3  # below this |b δ| one bin holds all classes: their terms are 1 within 1e-3
_FAR = 50.0  # beyond this |b δ| a term is below 2e-22 and adds nothing to a float32 sum


class BinnedSums:
    """Sums over classes at given inverse temperatures, by bins.

    Args:
        inverse: [J] inverse temperatures, all above 0.
        like: A tensor of the dtype and on the device of the values that will be summed.

    Example:
        >>> below = -torch.rand(2, 5000) * 20
        >>> sums = BinnedSums(torch.tensor([0.25, 0.7, 4.0]), below).sums(below)
        >>> torch.allclose(sums[:, 1].log(), (below * 0.7).exp().sum(-1).log(), atol=2e-6)
        True
    """

    def __init__(self, inverse: Tensor, like: Tensor) -> None:
        self.near, self.far = _NEAR / float(inverse.max()), _FAR / float(inverse.min())
        ends = torch.tensor([self.near, self.far], dtype=torch.float32).view(torch.int32)
        self.first, last = (ends >> _SHIFT).tolist()
        self.count = last - self.first + 1
        middles = _middles(torch.arange(self.first, last + 1, dtype=torch.int32))
        b = inverse.double()
        powers = exp_times(torch.outer(middles.double(), b), -1.0)
        # Smaller powers add nothing, and denormal numbers are slow to multiply.
        powers = torch.where(powers > 1e-30, powers, 0.0)
        table = torch.stack([powers, powers * b, powers * (b**2 / 2), powers * (b**3 / 6)])
        self.table = table.flatten(0, 1).to(like)

    def sums(self, below: Tensor) -> Tensor:
        """Σ_c exp(b δ_c) [N, J] for δ [N, V], where −inf is allowed."""
        depth = below.neg().nan_to_num_(nan=self.far).clamp_(max=self.far)
        codes = depth.float().clamp_min(self.near).view(torch.int32) >> _SHIFT
        deviation = _middles(codes) - depth
        index = (codes - self.first).long()
        moments = below.new_zeros(len(below), 4, self.count)
        n, first, second, third = moments.unbind(1)
        n.scatter_add_(-1, index, torch.ones_like(below))
        first.scatter_add_(-1, index, deviation)
        second.scatter_add_(-1, index, deviation.square_())
        mean = first / n.clamp_min(1)
        # Σ d³ = 3 mean Σ d² − 2 n mean³ if the third central moment is 0.
        torch.addcmul(second * 3, first, mean, value=-2, out=third).mul_(mean)
        return moments.flatten(1) @ self.table


def _middles(codes: Tensor) -> Tensor:
    """The middles of bins, as values of −δ."""
    return codes.bitwise_left_shift(_SHIFT).bitwise_or_(1 << (_SHIFT - 1)).view(torch.float32)
