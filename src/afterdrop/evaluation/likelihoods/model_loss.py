"""The loss that a model returns beside its logits: whether it has the same targets in mind."""

from __future__ import annotations

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
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or targets.dim() < 2:
        return
    shifted = torch.full_like(targets, likelihood.ignore_index)
    shifted[:, :-1] = targets[:, 1:]
    own, wanted = _xe(output, targets, likelihood), loss.item()
    other = _xe(output, shifted, likelihood)
    tolerance = max(1e-4, 4 * torch.finfo(loss.dtype).eps) * max(1.0, abs(wanted))
    if abs(own - wanted) > tolerance and abs(other - wanted) <= tolerance:
        raise DataError(
            f"the model's own loss is {wanted:.4f}, that of targets shifted by one position, but "
            f"these targets give {own:.4f}: the logits at position t predict token t + 1. Shift "
            "the targets, as in torch.nn.functional.pad(labels[:, 1:], (0, 1), "
            f"value={likelihood.ignore_index})"
        )


def _xe(output: Any, targets: Tensor, likelihood: Categorical) -> float:
    """Mean cross entropy of the targets that count."""
    logits = likelihood.read_output(output, targets, 1)[0].float()
    counted = targets.flatten()[likelihood.counts(targets)]
    return F.cross_entropy(logits, counted.to(logits.device)).item()
