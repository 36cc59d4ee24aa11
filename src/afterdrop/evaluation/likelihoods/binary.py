"""Targets that are 0 or 1, and outputs with one logit for each.

A label is a two-class distribution {1 − p, p} with logits (0, z), so that sums over samples are
those of classes (`categorical_sums`). α = 0 averages the logits z, α = 1 the probabilities.

Legend: B examples, N labels that count.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.family.member import Member
from afterdrop.masks.model_call import output_tensor

_ENOUGH = 32  # logits that all lie between 0 and 1 are then taken for probabilities


@dataclasses.dataclass(frozen=True)
class Binary(Categorical):
    """The likelihood of one logit per target: yes or no, or one of several labels.

    Args:
        several: Whether examples have several labels, numbered along `class_dim` (by default the
            last dimension); their frequencies differ (`Scores.by_frequency`).
    """

    several: bool = False

    def read_targets(self, targets: Any, number: int) -> Tensor:
        """Zeros and ones on the CPU, with the batch dimension first and the labels last."""
        try:
            given = torch.as_tensor(targets).cpu()
        except (RuntimeError, TypeError, ValueError):
            raise DataError(
                f"the targets of batch {number} are {type(targets).__name__}; give a tensor of 0 "
                "and 1"
            ) from None
        if given.dim() <= int(self.several):
            wanted = "[B, labels]" if self.several else "[B]"
            raise DataError(
                f"the targets of batch {number} have shape {tuple(given.shape)}; give {wanted}"
            )
        if given.is_floating_point():
            given = given.masked_fill(given.isnan(), self.ignore_index)
        known = (given == 0) | (given == 1) | (given == self.ignore_index)
        if not bool(known.all()):
            raise DataError(
                f"batch {number} has the target {given[~known][0].item():g}; give 0 and 1, and "
                f"ignore_index={self.ignore_index} or NaN for labels that do not count"
            )
        if given.shape[min(self.batch_dim, given.dim() - 1)] == 0:
            raise DataError(f"batch {number} has no examples; leave it out")
        return self._ordered(given).long()

    def read_output(self, output: Any, targets: Tensor, copies: int) -> Tensor:
        """Logits [copies, N, 2] of the targets (on the CPU) that count."""
        given = output_tensor(output, self.logits)
        rows, *rest = targets.shape
        z = self._ordered(given)
        if z.dim() == targets.dim() + 1 and z.shape[-1] == 1:
            z = z.squeeze(-1)
        if tuple(z.shape) != (copies * rows, *rest):
            raise DataError(
                f"logits of shape {tuple(given.shape)} do not match targets of shape "
                f"{tuple(targets.shape)}{f' x {copies} samples' * (copies > 1)}; the likelihood of "
                "labels needs one logit per label, in the shape of the targets"
            )
        logits = two_classes(z.reshape(copies, targets.numel()))
        counts = self.counts(targets)
        return logits if bool(counts.all()) else logits[:, counts]

    def check_axes(self, output: Any, targets: Tensor) -> None:
        """Every logit belongs to one target: nothing is in doubt."""

    def check_output(self, output: Tensor) -> None:
        """Refuses probabilities: many numbers that all lie between 0 and 1."""
        z = output[..., 1]
        if len(z) >= _ENOUGH and bool(((z >= 0) & (z <= 1)).all()):
            raise DataError(
                "the model gives probabilities (all its outputs lie between 0 and 1); give logits, "
                "as they are before the sigmoid"
            )

    def read_logits(self, output: Any) -> tuple[Tensor, int]:
        """Logits [..., 2] in the shape of the output, and their batch dimension."""
        z = output_tensor(output, self.logits)
        if not self.several and z.dim() > 1 and z.shape[-1] == 1:
            z = z.squeeze(-1)
        return two_classes(z), min(self.batch_dim, z.dim() - 1)

    def prediction(self, found: Tensor, member: Member) -> Tensor:
        """Log-probabilities [..., 2] of 0 and 1."""
        return found

    def labels(self, targets: Tensor) -> Tensor | None:
        """[N] the number of each counted target's label; None if there is one label."""
        if not self.several:
            return None
        numbers = torch.arange(targets.shape[-1]).expand(targets.shape)
        return numbers.flatten()[self.counts(targets)]

    def _ordered(self, tensor: Tensor) -> Tensor:
        """With the batch dimension first and, of several labels, theirs last."""
        if self.several and self.class_dim is not None and tensor.dim() > 1:
            if self.class_dim % tensor.dim() == self.batch_dim:
                raise DataError(
                    f"class_dim={self.class_dim} of shape {tuple(tensor.shape)} is the batch "
                    "dimension; give the dimension of the labels"
                )
            batch = self.batch_dim - (self.class_dim % tensor.dim() < self.batch_dim)
            return tensor.movedim(self.class_dim, -1).movedim(batch, 0)
        return tensor.movedim(self.batch_dim, 0) if tensor.dim() > self.batch_dim else tensor


def two_classes(z: Tensor) -> Tensor:
    """The logits (0, z) of the classes 0 and 1.

    Example:
        >>> two_classes(torch.tensor([0.0, 2.0])).softmax(-1)[:, 1]
        tensor([0.5000, 0.8808])
    """
    return torch.stack([torch.zeros_like(z), z], -1)
