"""How uncertain a predicted number is, and how much of that is disagreement between mask samples.

Legend: K samples, B examples, P parameters; sample k has the mean μ_k and the variance σ_k².

    mean, variance       of the member's distribution
    expected variance    mean_k σ_k²                       aleatoric: what each sample expects
    variance of means    mean_k μ_k² − (mean_k μ_k)²       epistemic: what the samples disagree on

The variance is the sum of the last two only if the member is the plain mean of its samples (α = 1,
T = 1): the law of total variance. The samples are those that the member averages: tempered, or with
the noise variance, if that belongs to each sample.

Standard errors come from the spread between independent blocks of samples, as for classes
(`uncertainty`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import MemberError
from afterdrop.evaluation.likelihoods.density_reading import DensityReading
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.predictive import Average, Predictive, tempered_samples
from afterdrop.family.member import Member
from afterdrop.selection.uncertainty import Moments


@dataclasses.dataclass(frozen=True)
class NumberUncertainty:
    """Predicted numbers of a member and how uncertain they are.

    Attributes:
        member: The member.
        mean: [B, ...] the expected value.
        variance: [B, ...] the variance of the prediction.
        expected_variance: [B, ...] the mean of the samples' variances (aleatoric).
        variance_of_means: [B, ...] the variance of the samples' means (epistemic).
        errors: The standard error of each of these from the number of masks; None if there is one
            block of samples only, which shows no error.

    Example:
        >>> from torch import nn
        >>> import afterdrop as ad
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1), nn.Flatten(0))
        >>> options = {"likelihood": "squared_error", "noise_variance": 0.5}
        >>> found = ad.Predictor(net, ad.AMC, 8, **options).uncertainty(torch.randn(5, 4))
        >>> total = found.expected_variance + found.variance_of_means
        >>> found.mean.shape, torch.allclose(found.variance, total, rtol=1e-5)
        (torch.Size([5]), True)
    """

    member: Member
    mean: Tensor
    variance: Tensor
    expected_variance: Tensor
    variance_of_means: Tensor
    errors: NumberUncertainty | None = None


def number_uncertainty(
    reading: DensityReading,
    found: Tensor,
    member: Member,
    average: Average = "power",
    spans: Sequence[range] = (),
) -> NumberUncertainty:
    """The uncertainty of a member, from the parameters of its samples.

    Args:
        reading: The likelihood.
        found: [..., K, P].
        member: The member.
        average: As for `Predictor`.
        spans: The samples of each independent block; empty without dropout, where nothing varies.
    """
    samples, at = reading.samples(found, member)
    means, variances = sample_moments(reading.kind, samples, at)

    def quantities(own: slice) -> dict[str, Any]:
        made = Predictive.of(reading.kind, samples[own], at, average)
        return {
            "mean": made.mean,
            "variance": made.variance,
            "expected_variance": variances[own].mean(0),
            "variance_of_means": means[own].var(0, correction=0),
        }

    whole = quantities(slice(None))
    errors: dict[str, Any] | None = None
    if not spans:
        errors = {name: torch.zeros_like(value) for name, value in whole.items()}
    elif len(spans) > 1:
        blocks = Moments()
        for span in spans:
            own = quantities(slice(span.start, span.stop))
            blocks.add(*(value[None] for value in own.values()))
        # Of the mean of all blocks: the spread of one over the root of their number.
        errors = {n: (v / (len(spans) - 1)).sqrt() for n, v in zip(whole, blocks.variances())}
    stated = None if errors is None else NumberUncertainty(member, **errors)
    return NumberUncertainty(member, errors=stated, **whole)


def sample_moments(
    kind: ParametricLikelihood, samples: Tensor, member: Member
) -> tuple[Tensor, Tensor]:
    """Means and variances [K, ...] of samples [K, ..., P] as the member averages them."""
    parameters, power, _ = tempered_samples(kind, samples, member)
    closed = kind.moments(parameters) if power == 1 else None
    if closed is not None:
        return closed
    each = [Predictive(kind, p.unsqueeze(0), power=power) for p in parameters]
    return torch.stack([p.mean for p in each]), torch.stack([p.variance for p in each])


def sample_parameters(reading: DensityReading, found: Tensor, member: Member) -> Tensor:
    """Parameters [K, ..., P] of samples as the member averages them, from [..., K, P].

    Raises:
        MemberError: If the member tempers samples that have no parameters then.
    """
    samples, at = reading.samples(found, member)
    parameters, power, _ = tempered_samples(reading.kind, samples, at)
    if power != 1:
        raise MemberError(
            f"samples of {reading.kind.name} at temperature={member.temperature:g} have no "
            "parameters; ask a predictor whose member has temperature 1 for them"
        )
    return parameters
