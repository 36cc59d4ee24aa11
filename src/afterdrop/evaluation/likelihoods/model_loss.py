"""The loss that a model returns beside its logits: whether it has the same targets in mind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods.categorical import Categorical


def check_loss(output: Any, targets: Tensor, likelihood: Categorical) -> None:
    """Refuses targets that must be shifted by one position to give the model's own loss.

    Causal language models of transformers take unshifted `labels` and shift them inside. A loss
    that neither reading gives contains something else, and says nothing.

    Args:
        output: What the model returned in eval mode.
        targets: [B, ...] on the CPU.
        likelihood: Reads the output.

    Raises:
        DataError: If the loss is that of the shifted targets, and not that of the targets.
    """
    found = _compare(output, targets, likelihood)
    if found is not None and found.as_shifted and not found.as_given:
        raise DataError(
            f"the model's own loss is {found.own:.4f}, that of targets shifted by one position, "
            f"but these targets give {found.given:.4f}: the logits at position t predict token "
            "t + 1. Shift the targets, as in torch.nn.functional.pad(labels[:, 1:], (0, 1), "
            f"value={likelihood.ignore_index})"
        )


def shifts_targets(output: Any, labels: Tensor, likelihood: Categorical) -> bool:
    """Whether the loss of a model that was given labels is that of labels shifted by one position.

    Args:
        output: What the model returned for the labels, in eval mode.
        labels: [B, ...] on the CPU.
        likelihood: Reads the output.

    Raises:
        DataError: If the loss is neither that of the labels nor that of the shifted ones.
    """
    found = _compare(output, labels, likelihood)
    if found is None or found.as_given:
        return False
    if not found.as_shifted:
        raise DataError(
            f"the model's own loss is {found.own:.4f}; its labels give {found.given:.4f} as they "
            f"are and {found.shifted:.4f} shifted by one position, so it is in doubt which logits "
            "belong to which label; say it: targets='labels' for labels as they are, or a function "
            "of the batch that shifts them"
        )
    return True


def shift_left(targets: Tensor, ignore_index: int) -> Tensor:
    """Targets [B, time, ...] of the next position; the last ones do not count.

    Example:
        >>> shift_left(torch.tensor([[1, 2, 3]]), -100)
        tensor([[   2,    3, -100]])
    """
    shifted = torch.full_like(targets, ignore_index)
    shifted[:, :-1] = targets[:, 1:]
    return shifted


@dataclasses.dataclass(frozen=True)
class _Losses:
    """A model's own loss, and that of targets as given and shifted."""

    own: float
    given: float
    shifted: float
    tolerance: float

    @property
    def as_given(self) -> bool:
        return abs(self.given - self.own) <= self.tolerance

    @property
    def as_shifted(self) -> bool:
        return abs(self.shifted - self.own) <= self.tolerance


def _compare(output: Any, targets: Tensor, likelihood: Categorical) -> _Losses | None:
    """The losses; None if the output has no loss, or the targets cannot be shifted."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or targets.dim() < 2:
        return None
    shifted = shift_left(targets, likelihood.ignore_index)
    own = loss.item()
    tolerance = max(1e-4, 4 * torch.finfo(loss.dtype).eps) * max(1.0, abs(own))
    given, other = (_xe(output, of, likelihood) for of in (targets, shifted))
    return _Losses(own, given, other, tolerance)


def _xe(output: Any, targets: Tensor, likelihood: Categorical) -> float:
    """Mean cross entropy of the targets that count."""
    logits = likelihood.read_output(output, targets, 1)[0].float()
    counted = targets.flatten()[likelihood.counts(targets)]
    return F.cross_entropy(logits, counted.to(logits.device)).item()
