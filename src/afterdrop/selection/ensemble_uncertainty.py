"""How uncertain the mean of an ensemble is, with errors from a jackknife over its models.

The models of an ensemble are too few to form independent blocks. Left out one at a time, they show
by how much the result would differ with other models of the same kind:

    error² = (G − 1)/G · Σ_g (x_-g − mean x_-g)²      x_-g without the samples of model g

Legend: K samples, S samples of a chunk, G models (or views of one model), V classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from afterdrop.family.member import Member
from afterdrop.selection.member_mean import sample_log_probs
from afterdrop.selection.uncertainty import Uncertainty, UncertaintySums

_OF_SAMPLES = ("disagreement", "variance")  # which one sample does not show


class JackknifeUncertainty:
    """Keeps the samples of an ensemble, and computes its uncertainty from them.

    Args:
        member: How to predict.

    Example:
        >>> found = JackknifeUncertainty(Member(alpha=1, multiplier=1))
        >>> for p in ([0.5, 0.5], [0.1, 0.9], [0.3, 0.7]):
        ...     found.add(torch.tensor([p]).log(), "the example")
        ...     found.end_block()
        >>> found.result().variance, found.result().errors.confidence
        (tensor([0.0267, 0.0267]), tensor(0.1164))
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self._groups: list[list[Tensor]] = [[]]

    def add(self, logits: Tensor, where: str) -> None:
        """Adds logits [S, ..., V] of samples; `where` they come from is for messages."""
        sample_log_probs(logits, self.member, where)  # refuses NaN before all models have run
        self._groups[-1].append(logits)

    def end_block(self) -> None:
        """Closes the samples of a model."""
        self._groups.append([])

    def result(self) -> Uncertainty:
        """The uncertainty, once the samples of every model are there."""
        groups = [torch.cat(group) for group in self._groups if group]
        found = self._of(groups)
        if len(groups) < 2:
            return found
        without = [self._of(groups[:g] + groups[g + 1 :]) for g in range(len(groups))]
        errors: dict[str, Any] = {
            field.name: _jackknife([getattr(each, field.name) for each in without])
            for field in dataclasses.fields(Uncertainty)
            if isinstance(getattr(found, field.name), Tensor)
        }
        impossible = found.log_probs.isneginf()
        errors["log_probs"] = errors["log_probs"].masked_fill(impossible, 0)
        # Without a model another class may be the most probable one: follow that of the whole.
        top = found.log_probs.argmax(-1, keepdim=True)
        errors["confidence"] = found.confidence * errors["log_probs"].gather(-1, top).squeeze(-1)
        if sum(map(len, groups[1:])) == 1:  # two samples
            errors |= {name: torch.full_like(errors[name], torch.nan) for name in _OF_SAMPLES}
        return dataclasses.replace(found, errors=Uncertainty(self.member, **errors))

    def _of(self, groups: Sequence[Tensor]) -> Uncertainty:
        """Of some models, without errors."""
        sums = UncertaintySums(self.member)
        for logits in groups:
            sums.add(logits, "the input")
        sums.end_block()
        return sums.result()

    @staticmethod
    def join(parts: Sequence[Uncertainty], dim: int) -> Uncertainty:
        """The uncertainty of all examples."""
        return Uncertainty.join(parts, dim)


def _jackknife(without: Sequence[Tensor]) -> Tensor:
    """Standard error from values without each group."""
    values = torch.stack(list(without))
    spread = (values - values.mean(0)).square().sum(0)
    return (spread * (len(values) - 1) / len(values)).sqrt()
