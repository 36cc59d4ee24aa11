"""Replicas of a model in several processes, with equal weights and a share of each batch.

A step sums the gradients of the shares. Everything after it (prior, clipping, optimiser, averaging)
is the same arithmetic on the same numbers in every process, so the weights stay equal without being
sent. Every validation checks that they do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from afterdrop.errors import RankError
from afterdrop.ranks import Ranks
from afterdrop.train.checks import ConfigError


def check_batch(batch_size: int, ranks: Ranks) -> None:
    """Requires that the ranks can share a batch evenly.

    Raises:
        ConfigError: If they cannot.

    Example:
        >>> check_batch(64, Ranks(count=3))
        Traceback (most recent call last):
        afterdrop.train.checks.ConfigError: objective.batch_size is 64; 3 ranks cannot share it \
evenly. Start a number of ranks that divides it, or change it in a new run.
    """
    if batch_size % ranks.count:
        raise ConfigError(
            f"objective.batch_size is {batch_size}; {ranks.count} ranks cannot share it evenly. "
            "Start a number of ranks that divides it, or change it in a new run."
        )


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], loss: Tensor, ranks: Ranks) -> Tensor:
    """Sums the gradients of all ranks in place, and returns the sum of their losses.

    One message per step: all gradients and the loss in one buffer.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> weight.sum().backward()
        >>> sum_gradients([weight], torch.tensor(2.0), Ranks())
        tensor(2.)
    """
    if ranks.count == 1:
        return loss
    grads = [p.grad for p in parameters if p.grad is not None]
    buffer = torch.cat([*(grad.flatten() for grad in grads), loss.to(grads[0].dtype).view(1)])
    ranks.sum(buffer)
    *sums, total = buffer.split([*(grad.numel() for grad in grads), 1])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(sums, grads)])
    return total.view(())


@torch.no_grad()
def check_equal(parameters: Sequence[Tensor], step: int, ranks: Ranks) -> None:
    """Requires that all ranks have the same weights, to the bit.

    Raises:
        RankError: If they have drifted apart.
    """
    if ranks.count == 1:
        return
    norms = torch.stack(torch._foreach_norm(list(parameters))).double()
    if any(not torch.equal(norms, other) for other in ranks.gather_rows(norms)):
        raise RankError(
            f"the ranks have different weights at step {step}: their hardware or software differs. "
            "Use equal hosts, or fewer; the same command resumes from the last validation"
        )
