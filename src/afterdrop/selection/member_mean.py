"""The log-probabilities of one member, from the logits of its mask samples."""

from __future__ import annotations

from torch import Tensor

from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.family.member import Member
from afterdrop.family.power_mean import PowerSums


class MemberMean:
    """Averages mask samples as a member does.

    Args:
        member: How to predict.

    Example:
        >>> import torch
        >>> mean = MemberMean(Member(alpha=1, multiplier=1))
        >>> mean.add(torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(), "the example")
        >>> mean.log_probs().exp()
        tensor([0.3000, 0.7000])
    """

    def __init__(self, member: Member) -> None:
        self.member, self._sums = member, PowerSums((member.alpha,))

    def add(self, logits: Tensor, where: str) -> None:
        """Adds logits [S, ..., V] of samples; `where` they come from is for messages."""
        logits = logits.float()
        if self.member.temper == "sample":
            logits = logits / self.member.temperature
        self._sums.add(Categorical().predict(logits, where))

    def log_probs(self) -> Tensor:
        """Log-probabilities [..., V]."""
        log_means = self._sums.log_mean(self.member.alpha)
        if self.member.temper == "mean":
            log_means = log_means / self.member.temperature
        return log_means.log_softmax(-1)
