"""The chosen mean of samples that were computed elsewhere.

Legend: K samples, V classes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from afterdrop.errors import DataError
from afterdrop.evaluation.ensemble import Ensemble
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood
from afterdrop.evaluation.likelihoods.density_reading import DensityReading
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.sample_reading import stored_predictions
from afterdrop.family.member import Member
from afterdrop.selection.member_mean import MemberMean


def combine_samples(samples: Any, member: Member, ensemble: Ensemble, request: Request) -> Any:
    """What a member of an ensemble predicts from its samples.

    Args:
        samples: [K, ..., V], or as `evaluate_samples` takes them for another likelihood.
        member: How to predict.
        ensemble: What was evaluated.
        request: The evaluation.

    Returns:
        [..., V] log-probabilities, or the distributions of numbers.

    Raises:
        DataError: If they are not the samples that were evaluated.
    """
    # Stored samples are the logits themselves: no function has to find them.
    likelihood = build_likelihood(dataclasses.replace(request, logits=None))
    remedy = (
        f"give the {ensemble.num_samples} samples that were evaluated, along the first dimension"
    )
    try:
        found = torch.as_tensor(samples)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"samples is {type(samples).__name__}, which is not an array ({error}); {remedy}"
        ) from error
    if not found.dim() or len(found) != ensemble.num_samples or ensemble.masks is not None:
        raise DataError(f"samples of shape {tuple(found.shape)}; {remedy}")
    if member.deterministic:
        found = found[ensemble.best : ensemble.best + 1]
    found = stored_predictions(found, likelihood)
    if isinstance(likelihood, DensityReading):
        return likelihood.prediction(found.movedim(0, -2), member)
    mean = MemberMean(member)
    mean.add(found, "the samples")
    return mean.result()
