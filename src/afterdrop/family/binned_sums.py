"""Σ_c exp(b δ_c) over many classes at many b at once: classes of nearly equal δ count as one.

The exponent of a float and the first 6 bits of its fraction are the number of its bin: 64 bins an
octave of −δ, each at most 1/64 of δ wide, and no logarithm is taken. With d = δ − the bin's middle,

    Σ_c exp(b δ_c)  ≈  Σ_bins e^(b middle) · (n + b Σ d + b²/2 Σ d² + b³/6 Σ d³)

is one matrix product of the bins' moments with a table of every b. Σ d³ is taken from the other
three (the classes of a bin as symmetric around their mean), which is exact where they are equal.
What is left out is below (b δ/128)⁴/24 of a class's own term e^(b δ), and 0.13 (b δ/128)³ of it in
the worst bin, whose classes lie in two clumps: at b δ = −10 that is 6e-5 of terms that are e^(−10).

Legend: N rows, V classes, J inverse temperatures b; δ = log M − max, at most 0.
"""

import torch
from torch import Tensor

from afterdrop.family.exponential import exp_times

_SHIFT = 17  # of the 23 bits of a float32's fraction, all but the first 6
_NEAR = 1e-3  # |b δ| below which one bin holds all classes
_FAR = 50.0  # |b δ| beyond which a class adds nothing


class BinnedSums:
    """The bins and the table for some inverse temperatures.

    Args:
        inverse: [J] inverse temperatures, all above 0.
        like: A tensor of the type and on the device of what will be summed.

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
        # Smaller ones add nothing, and numbers below the normal range are slow to multiply.
        powers = torch.where(powers > 1e-30, powers, 0.0)
        table = torch.stack([powers, powers * b, powers * (b**2 / 2), powers * (b**3 / 6)])
        self.table = table.flatten(0, 1).to(like)

    def sums(self, below: Tensor) -> Tensor:
        """Σ_c exp(b δ_c) [N, J] of δ [N, V], −inf allowed."""
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
        # Σ d³ = 3 mean Σ d² − 2 n mean³ if the third moment around the mean is 0
        torch.addcmul(second * 3, first, mean, value=-2, out=third).mul_(mean)
        return moments.flatten(1) @ self.table


def _middles(codes: Tensor) -> Tensor:
    """The middles of bins, as depths −δ."""
    return codes.bitwise_left_shift(_SHIFT).bitwise_or_(1 << (_SHIFT - 1)).view(torch.float32)
