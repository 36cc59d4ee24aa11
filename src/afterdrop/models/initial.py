"""Initial weights, as in lamb; all normals are truncated at two standard deviations.

    gate weights   σ = √(1.3 / fan-in) with the fan-in of each block: actual sd ≈ 1/√fan-in
    gate biases    σ = √(1.3 / H), random; the forget gate's around `forget_bias`
    embeddings     actual sd exactly √(1 / E), untied softmax too; softmax bias 0
    projection     semi-orthogonal
    Mogrifier      low rank K: both factors σ = (1 / (fan-in · K))^¼, so that the sd of an entry of
                   their product is 0.774/√fan-in; a full matrix as gate weights; biases 0

The two corrections for the truncation (1.3 inside the root, and an exact division) differ on
purpose.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Standard deviation of a unit normal truncated to [-2, 2].
TRUNCATED_SD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


def truncated_normal_(
    tensor: Tensor, sigma: float, mean: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """Fills a tensor with a normal of scale sigma, truncated two sigmas from its mean.

    Example:
        >>> bool((truncated_normal_(torch.empty(1000), 0.1).abs() <= 0.2).all())
        True
    """
    return torch.nn.init.trunc_normal_(
        tensor, mean, sigma, mean - 2 * sigma, mean + 2 * sigma, generator=generator
    )


def gate_normal_(
    tensor: Tensor, fan_in: int, mean: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """Fills a gate's weights or bias: σ = √(1.3 / fan_in).

    Example:
        >>> weight = gate_normal_(torch.empty(400, 100), fan_in=100)
        >>> bool(abs(weight.std() * 10 - 1) < 0.02)
        True
    """
    return truncated_normal_(tensor, math.sqrt(1.3 / fan_in), mean, generator)


def factor_normal_(
    tensor: Tensor, fan_in: int, rank: int, generator: torch.Generator | None = None
) -> Tensor:
    """Fills one of the two factors of a matrix of low rank: σ = (1 / (fan_in · rank))^¼.

    Example:
        >>> up, down = (factor_normal_(torch.empty(s), 100, 9) for s in ((100, 9), (9, 100)))
        >>> bool(abs((up @ down).std() * 10 / 0.774 - 1) < 0.1)
        True
    """
    return truncated_normal_(tensor, (fan_in * rank) ** -0.25, generator=generator)


def embedding_normal_(tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Fills a table [V, E] to an actual standard deviation of √(1 / E).

    Example:
        >>> table = embedding_normal_(torch.empty(1000, 100))
        >>> bool(abs(table.std() * 10 - 1) < 0.02)
        True
    """
    sigma = math.sqrt(1 / tensor.shape[1]) / TRUNCATED_SD
    return truncated_normal_(tensor, sigma, generator=generator)
