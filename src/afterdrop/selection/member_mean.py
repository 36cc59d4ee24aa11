"""What becomes of the mask samples of one member: their mean, or the samples themselves.

    MemberMean     log-probabilities of the member
    KeptSamples    log-probabilities of each sample

More about the samples than their mean: `uncertainty`. As few samples as needed: `stopping_mean`.

Legend: K samples, S samples of a chunk, B examples, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.family.member import Member
from afterdrop.family.power_mean import SMALL_ALPHA, PowerSums


class Collector(Protocol):
    """Takes the logits of samples, chunk by chunk, and gives a result for some examples."""

    def add(self, logits: Tensor, where: str) -> None:
        """Adds logits [S, ..., V] of samples; `where` they come from is for messages."""

    def end_block(self) -> None:
        """Closes an independent block of samples."""

    def result(self) -> Any:
        """The result, once every sample was added."""

    @staticmethod
    def join(parts: Sequence[Any], dim: int) -> Any:
        """The result for all examples, from those of parts; `dim` is their batch dimension."""


def sample_log_probs(logits: Tensor, member: Member, where: str) -> Tensor:
    """The log-probabilities of samples that a member averages: tempered, if it tempers samples."""
    logits = logits.float()
    if member.temper == "sample":
        logits = logits / member.temperature
    return Categorical().predict(logits, where)


class MemberMean:
    """Averages mask samples as a member does.

    Args:
        member: How to predict.
        errors: Whether `standard_error` will be asked for.

    Example:
        >>> import torch
        >>> mean = MemberMean(Member(alpha=1, multiplier=1))
        >>> mean.add(torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(), "the example")
        >>> mean.result().exp()
        tensor([0.3000, 0.7000])
    """

    def __init__(self, member: Member, *, errors: bool = False) -> None:
        self.member, self._by_squares = member, errors and member.alpha < SMALL_ALPHA
        second = (2 * member.alpha,) if errors and not self._by_squares else ()
        self._sums = PowerSums((member.alpha, *second))
        self._squares: Tensor | None = None

    def add(self, logits: Tensor, where: str) -> None:
        """Adds logits [S, ..., V] of samples; `where` they come from is for messages."""
        lp = sample_log_probs(logits, self.member, where)
        if self._by_squares:
            squares = lp.square().sum(0)
            self._squares = squares if self._squares is None else self._squares + squares
        self._sums.add(lp)

    def end_block(self) -> None:
        """Nothing to do."""

    def result(self) -> Tensor:
        """Log-probabilities [..., V]."""
        return member_log_probs(self._sums.log_mean(self.member.alpha), self.member)

    @staticmethod
    def join(parts: Sequence[Tensor], dim: int) -> Tensor:
        """Log-probabilities of all examples."""
        return torch.cat(list(parts), dim)

    def select(self, dim: int, places: list[int]) -> None:
        """Keeps some entries of a dimension of the log-probabilities."""
        device = self._sums.totals[self.member.alpha].device
        index = torch.tensor(places, dtype=torch.int64).to(device)
        self._sums.select(dim, index)
        if self._squares is not None:
            self._squares = self._squares.index_select(dim, index)

    def standard_error(self) -> Tensor:
        """Standard error [...] of the log-probability of a class that is drawn from the prediction.

        The root of Σ p(c) · var(log M(c)), where the variance of the mean is that of independent
        samples: var(l) / (α² mean(l)² (K − 1)) with l = p_k(c)^α, and that of log p_k(c) if α is
        small. Stratified samples have a smaller error.
        """
        alpha, K = self.member.alpha, self._sums.count
        if self._by_squares:
            assert self._squares is not None
            variance = self._squares / K - self._sums.log_mean(alpha).square()
        else:
            first, second = self._sums.log_mean(alpha), self._sums.log_mean(2 * alpha)
            variance = (2 * alpha * (second - first)).expm1_() / alpha**2
        weighted = self.result().exp() * variance.clamp_min_(0.0)
        if K == 1:  # one sample says nothing of its error
            return torch.full_like(weighted[..., 0], math.inf)
        error = (weighted.nansum(-1) / (K - 1)).sqrt()  # a class that is masked out has no variance
        return error / self.member.temperature if self.member.temper == "mean" else error


class KeptParameters:
    """Keeps what samples returned, for a likelihood of numbers: a few parameters each.

    Args:
        member: How to predict.

    Example:
        >>> kept = KeptParameters(Member(alpha=1, multiplier=1))
        >>> kept.add(torch.zeros(3, 5, 2), "the example")
        >>> kept.result().shape
        torch.Size([5, 3, 2])
    """

    def __init__(self, member: Member) -> None:
        self._kept: list[Tensor] = []

    def add(self, outputs: Tensor, where: str) -> None:
        """Adds outputs [S, ..., P] of samples."""
        self._kept.append(outputs)

    def end_block(self) -> None:
        """Nothing to do."""

    def result(self) -> Tensor:
        """All of them [..., K, P], from which the likelihood makes a distribution."""
        return torch.cat(self._kept).movedim(0, -2)

    @staticmethod
    def join(parts: Sequence[Tensor], dim: int) -> Tensor:
        """The parameters for all examples."""
        return torch.cat(list(parts), dim)


def member_log_probs(log_means: Tensor, member: Member) -> Tensor:
    """Log-probabilities of a member, from its log power means [..., V]."""
    if member.temper == "mean":
        log_means = log_means / member.temperature
    return log_means.log_softmax(-1)


class KeptSamples:
    """Keeps the log-probabilities of every sample, as the member averages them.

    Args:
        member: How to predict.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self._chunks: list[Tensor] = []

    def add(self, logits: Tensor, where: str) -> None:
        """Adds logits [S, ..., V] of samples; `where` they come from is for messages."""
        self._chunks.append(sample_log_probs(logits, self.member, where))

    def end_block(self) -> None:
        """Nothing to do."""

    def result(self) -> Tensor:
        """Log-probabilities [S, ..., V] of all samples that were added."""
        return torch.cat(self._chunks)

    @staticmethod
    def join(parts: Sequence[Tensor], dim: int) -> Tensor:
        """Log-probabilities of the samples for all examples."""
        return torch.cat(list(parts), dim + 1)
