"""The deterministic cross entropy of a validation pass, at T = 1 and at the optimal temperature.

The log-partition is summed at nine nodes of the inverse temperature b in [½, 2], the middle one at
b = 1. XE(b) is convex and smooth, so interpolation gives the optimum to about 1e-6 nats.

Legend: N targets, V classes, J nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.family.temperature import Nodes, fit_temperature
from afterdrop.kernels import partitions
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.train.replicas import together

NODES = Nodes(0.5, 2.0, count=9, reach=1.0)


@dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        xe: Cross entropy in nats at T = 1.
        temperature: The optimal temperature, within [½, 2].
        xe_optimal: Cross entropy at that temperature.
        targets: Number of targets.
    """

    xe: float
    temperature: float
    xe_optimal: float
    targets: int


def validate(batches: Iterable[tuple[Tensor, Tensor]], ranks: Ranks = SINGLE_PROCESS) -> Validation:
    """Cross entropies of predictions.

    Args:
        batches: Logits [N, V] and targets [N].
        ranks: The processes that have the other targets.

    Raises:
        DataError: If there are no targets.

    Example:
        >>> logits = torch.tensor([[3.0, 0.0]]).repeat(4, 1)
        >>> found = validate([(logits, torch.tensor([0, 0, 0, 1]))])
        >>> round(found.xe, 3), round(found.temperature, 2)  # 3/4 is a logit of log 3, not 3
        (0.799, 2.0)
    """
    totals = ranks.sum(together(lambda: _sums(batches), ranks))
    sums_J, at_target, count = totals[:-2], float(totals[-2]), int(totals[-1])
    if count == 0:
        raise DataError("the validation split has no targets; give it at least one line")
    values, target = sums_J / count, torch.tensor([at_target / count], dtype=torch.float64)
    temperature, _ = fit_temperature(values.unsqueeze(0), target, NODES)

    def xe(b: Tensor) -> float:
        return float((NODES.weights(b) * values).sum(-1) - b * target)

    plain, optimal = xe(torch.ones(1, dtype=torch.float64)), xe(1 / temperature)
    return Validation(plain, float(temperature), min(plain, optimal), count)


def _sums(batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Sums over targets of G at each node and of the target's log-probability, and their number."""
    inverse, count = NODES.inverse(), 0
    sums: Tensor | None = None  # on the device of the logits
    for logits, targets in batches:
        G_JN, peak = partitions(logits.float(), inverse)
        chosen = logits.float().gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        found = torch.cat([G_JN, (chosen - peak).unsqueeze(0)]).double().sum(1)
        sums = found if sums is None else sums + found
        count += len(targets)
    if sums is None:
        sums = torch.zeros(len(inverse) + 1, dtype=torch.float64)
    sums = sums.cpu()  # the only time that this waits for a GPU
    return torch.cat([sums, sums.new_tensor([count])])
