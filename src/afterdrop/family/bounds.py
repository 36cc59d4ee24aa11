"""The dropout objective as a lower bound, and how far below each member's objective it lies.

Per target, on the same samples, at temperature 1 (Melis et al., 2018, §3; DESIGN §1):

    bound           D = mean_k log p_k(y)
    Jensen gap      log M_α(y) − D ≥ 0
    normaliser gap  −log Z_α ≥ 0,  Z_α = Σ_c M_α(c) ≤ 1
    objective       log M_α(y) − log Z_α = D + Jensen gap + normaliser gap        (an identity)

With l_k = p_k(y)^α, μ its mean and CV² = var(l)/μ² (population variance):

    Jensen gap      ≈ CV²/(2α), and f(r_max)·CV²/α ≤ gap ≤ f(r_min)·CV²/α   (Liao and Berg, 2017)
                    where r = l/μ − 1 and f(r) = (r − log1p(r))/r² decreases from r > −1
    normaliser gap  ≈ (1 − α)/2 · Σ_c var(p_c)/mean(p_c)

Everything is computed from log-probabilities, never from probabilities, so nothing underflows.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bound, gaps and tightness of one member, as means over targets (nats).

    Attributes:
        objective: Mean log-probability of the targets: −XE.
        bound: The dropout objective D at this multiplier, shared by every alpha.
        jensen_gap: log M(y) − D.
        normaliser_gap: −log Z.
        variance: Variance of p(y) over the masks.
        mean_probability: Mean of p(y) over the masks; it shows how well rescaling preserves the
            expectation.
        jensen_approximation: CV²/(2α).
        jensen_lower: Lower bound of the Jensen gap.
        jensen_upper: Upper bound of the Jensen gap.
        normaliser_approximation: (1 − α)/2 · Σ_c var(p_c)/mean(p_c).
    """

    objective: float
    bound: float
    jensen_gap: float
    normaliser_gap: float
    variance: float
    mean_probability: float
    jensen_approximation: float
    jensen_lower: float
    jensen_upper: float
    normaliser_approximation: float

    def __str__(self) -> str:
        return (
            f"objective {self.objective:.4f} = bound {self.bound:.4f} + Jensen gap "
            f"{self.jensen_gap:.4f} + normaliser gap {round(self.normaliser_gap, 4) + 0.0:.4f}"
        )


def gap_factor(r: Tensor) -> Tensor:
    """f(r) = (r − log1p(r))/r², by its series near 0, where the numerator cancels.

    Example:
        >>> gap_factor(torch.tensor([0.0, 1.0], dtype=torch.float64))
        tensor([0.5000, 0.3069], dtype=torch.float64)
    """
    series = 0.5 - r / 3 + r.square() / 4 - r**3 / 5
    safe = torch.where(r.abs() < 1e-3, torch.ones_like(r), r)
    return torch.where(r.abs() < 1e-3, series, (safe - safe.log1p()) / safe.square())


def jensen_bounds(
    alpha: float, log_mean: Tensor, log_second: Tensor, lowest: Tensor, highest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Second-order approximation, lower and upper bound of the Jensen gap, per target.

    Args:
        alpha: Power of the mean.
        log_mean: log M_α(y).
        log_second: log M_2α(y), so that mean l² = exp(2α · log_second).
        lowest: Smallest log p_k(y).
        highest: Largest log p_k(y).
    """
    if alpha == 0:
        zero = torch.zeros_like(log_mean)
        return zero, zero, zero
    cv2 = (2 * alpha * (log_second - log_mean)).expm1().clamp_min(0.0)
    r_max = (alpha * (highest - log_mean)).expm1()
    r_min = (alpha * (lowest - log_mean)).expm1()
    return cv2 / (2 * alpha), gap_factor(r_max) * cv2 / alpha, gap_factor(r_min) * cv2 / alpha


def variance_of_probability(log_mean_1: Tensor, log_mean_2: Tensor) -> Tensor:
    """Population variance of p over the masks from log M_1 and log M_2."""
    return (2 * log_mean_1).exp() * (2 * (log_mean_2 - log_mean_1)).expm1().clamp_min(0.0)
