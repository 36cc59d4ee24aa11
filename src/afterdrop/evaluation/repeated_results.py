"""Whether an evaluation that is repeated has the results that were kept, up to rounding.

Noise on the logits moves the results by less than its share of their size, taken over all targets;
single results, at low temperatures above all, are moved by some times as much. It also decides ties
between classes: with a thousand of them, about two and a half times its share.
"""

import torch
from torch import Tensor

from afterdrop.evaluation.rounding import epsilon_across_devices, tolerance
from afterdrop.evaluation.scores import Scores

_TIES = 0.01  # the share of classes that may differ, if four times the rounding is less
_SINGLE = 10  # times the rounding of all results that a single one may have


def same_results(now: Scores, kept: Scores, epsilon: float, *, first: bool = False) -> bool:
    """Whether all results of an evaluation are among those that were kept.

    Args:
        now: Of the evaluation.
        kept: Of the one before.
        epsilon: Of the coarsest dtype of the model.
        first: Whether the evaluation is of the first targets, and of all members.
    """
    if now.protocol.device != kept.protocol.device:
        epsilon = epsilon_across_devices(epsilon)
    if first and now.protocol.sites != kept.protocol.sites:
        return False
    rounding = tolerance(epsilon)
    for name, tensor in now.tensors.items():
        other = kept.tensors.get(name)
        if other is not None and first:
            other = other[..., : now.num_targets]
        if other is None or other.shape != tensor.shape:
            return False
        if tensor.is_floating_point():
            alike = _close(tensor, other, rounding)
        else:
            ties = max(_TIES, 4 * rounding) if name.endswith(".class") else 0.0
            alike = int((tensor != other).sum()) <= ties * tensor.numel()
        if not alike:
            return False
    return True


def _close(tensor: Tensor, other: Tensor, rounding: float) -> bool:
    """Whether numbers are the same but for rounding, of all of them and of each."""
    each = _SINGLE * rounding
    if not torch.allclose(tensor, other, rtol=each, atol=each, equal_nan=True):
        return False
    away, size = (
        torch.linalg.vector_norm(x.nan_to_num(0, 0, 0), dtype=torch.float64)
        for x in (tensor - other, other)
    )
    return bool(away <= rounding * (size + tensor.numel() ** 0.5))
