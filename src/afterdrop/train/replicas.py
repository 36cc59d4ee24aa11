"""Replicas of a model in several processes, with equal weights and a share of each batch.

A step sums the gradients of the shares. Everything after it (prior, clipping, optimiser, averaging)
is the same arithmetic on the same numbers in every process, so the weights stay equal without being
sent. Every validation checks that they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from afterdrop.errors import RankError
from afterdrop.ranks import Ranks
from afterdrop.train.checks import ConfigError

_Value = TypeVar("_Value")


class FailedElsewhere(RankError):
    """Another rank failed at what this one has just done."""


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
def sum_gradients(parameters: Sequence[Tensor], numbers: Tensor, ranks: Ranks) -> Tensor:
    """Sums the gradients of all ranks in place, and returns the sum of their numbers [n].

    One message per step: all gradients and the numbers in one buffer.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> weight.sum().backward()
        >>> sum_gradients([weight], torch.tensor([2.0]), Ranks())
        tensor([2.])
    """
    if ranks.count == 1:
        return numbers
    grads = [p.grad for p in parameters if p.grad is not None]
    buffer = torch.cat([*(grad.flatten() for grad in grads), numbers.to(grads[0].dtype)])
    ranks.sum(buffer)
    *sums, total = buffer.split([*(grad.numel() for grad in grads), len(numbers)])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(sums, grads)])
    return total


def together(call: Callable[[], _Value], ranks: Ranks) -> _Value:
    """The result of a call without communication that, if it fails on one rank, fails on all.

    So all ranks try something else, or none does.

    Raises:
        FailedElsewhere: If it failed on other ranks only; otherwise the error of this rank.

    Example:
        >>> together(lambda: 7, Ranks())
        7
    """
    error: Exception | None = None
    try:
        result = call()
    except Exception as found:
        error = found
    failed = ranks.max(error is not None)
    if error is not None:
        raise error
    if failed:
        raise FailedElsewhere("another rank failed")
    return result


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
