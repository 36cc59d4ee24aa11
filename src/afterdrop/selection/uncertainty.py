"""How uncertain a prediction is, and how much of that is disagreement between mask samples.

Legend: K samples, S samples of a chunk, B examples, V classes. All are in nats, per target.

    predictive entropy   H(p)                  of the member p
    expected entropy     mean_k H(p_k)         of the samples that the member averages
    mutual information   H(p) − mean_k H(p_k) = mean_k KL(p_k ‖ p), for α = 1 and T = 1 (BALD)
    disagreement         mean_k D_α(p_k ‖ q) = (1 − Z^α) / (α (1 − α)), q = M_α / Z
    variance             mean_k p_k(c)² − (mean_k p_k(c))²

The entropies differ by the mutual information only if p is the plain mean of the samples. What
exists for every α is the mean divergence of the samples from their normalised power mean q, in the
divergence that q minimises (Amari, 2007):

    D_α(p ‖ q) = (1 − Σ_c p(c)^α q(c)^(1−α)) / (α (1 − α))

It is the mutual information as α → 1, and the normaliser gap −log Z = mean_k KL(q ‖ p_k) as α → 0.
A temperature that acts on the mean leaves the samples and their disagreement as they are.

Standard errors come from the spread between independent blocks of samples: two of them (halves)
give each error one degree of freedom.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import MemberError
from afterdrop.family.member import GEOMETRIC, Member
from afterdrop.family.power_mean import PowerSums
from afterdrop.selection.member_mean import member_log_probs, sample_log_probs

_OF_CLASSES = ("log_probs", "variance")  # these have a dimension of classes
_OF_TARGETS = ("confidence", "predictive_entropy", "expected_entropy", "disagreement")


@dataclasses.dataclass(frozen=True)
class Uncertainty:
    """Predictions of a member and how uncertain they are.

    Attributes:
        member: The member.
        log_probs: Its log-probabilities, in the shape of the model's logits.
        confidence: [B, ...] the largest probability of each target.
        predictive_entropy: [B, ...] the entropy of the prediction.
        expected_entropy: [B, ...] the mean entropy of the samples.
        disagreement: [B, ...] how much the samples disagree; `measure` says in which sense.
        variance: Of each class's probability over the samples, in the shape of the logits.
        errors: The standard error of each of these from the number of masks; None if there is one
            sample only, which shows no error.

    Example:
        >>> from torch import nn
        >>> import afterdrop as ad
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> found = ad.Predictor(net, ad.AMC, num_samples=8).uncertainty(torch.randn(5, 4))
        >>> found.mutual_information.shape, found.errors.mutual_information.shape, found.measure
        (torch.Size([5]), torch.Size([5]), 'mutual information')
    """

    member: Member
    log_probs: Tensor
    confidence: Tensor
    predictive_entropy: Tensor
    expected_entropy: Tensor
    disagreement: Tensor
    variance: Tensor
    errors: Uncertainty | None = None

    @property
    def mutual_information(self) -> Tensor:
        """[B, ...] predictive minus expected entropy.

        Raises:
            MemberError: If the member is not a plain mean at T = 1, for which it exists.
        """
        if not has_mutual_information(self.member):
            raise MemberError(
                f"mutual information does not exist for {self.member}: it needs alpha=1 and "
                f"temperature=1; .disagreement is the {self.measure}"
            )
        return self.disagreement

    @property
    def measure(self) -> str:
        """The sense in which `disagreement` measures how much the samples disagree."""
        alpha = self.member.alpha
        if has_mutual_information(self.member):
            return "mutual information"
        if alpha == 1:
            tempered = "tempered " * (self.member.temper != "mean")
            return f"mutual information of the {tempered}samples"
        if alpha == 0:
            return "mean KL divergence from the geometric mean to the samples"
        return f"mean alpha-divergence of the samples from their power mean, alpha = {alpha:g}"

    @staticmethod
    def join(parts: Sequence[Uncertainty], dim: int) -> Uncertainty:
        """The uncertainty of all examples, from that of parts.

        Args:
            parts: Of some examples each, with the classes last.
            dim: The batch dimension.
        """
        fields: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts], dim)
            for name in _OF_CLASSES + _OF_TARGETS
        }
        errors = [part.errors for part in parts if part.errors is not None]
        joined = Uncertainty.join(errors, dim) if errors else None
        return Uncertainty(member=parts[0].member, errors=joined, **fields)

    def classes_at(self, class_dim: int) -> Uncertainty:
        """The same with the classes, which are last, in another dimension."""
        moved = {name: getattr(self, name).movedim(-1, class_dim) for name in _OF_CLASSES}
        errors = None if self.errors is None else self.errors.classes_at(class_dim)
        return dataclasses.replace(self, **moved, errors=errors)


def has_mutual_information(member: Member) -> bool:
    """Whether the member is the plain mean of its samples; without dropout every mean is."""
    return member.temperature == 1 and (member.alpha == 1 or member.deterministic)


def certain(log_probs: Tensor, member: Member) -> Uncertainty:
    """The uncertainty of a member without dropout: its samples are all alike.

    Args:
        log_probs: [..., V] of the member.
        member: The member.
    """
    entropy = _entropy(log_probs)
    zero, zeros = torch.zeros_like(entropy), torch.zeros_like(log_probs)
    fields = log_probs, log_probs.amax(-1).exp(), entropy, entropy, zero, zeros
    errors = Uncertainty(member, zeros, zero, zero, zero, zero, zeros)
    return Uncertainty(member, *fields, errors)


class UncertaintySums:
    """Accumulates mask samples; the memory does not grow with their number.

    Args:
        member: How to predict.

    Example:
        >>> sums = UncertaintySums(Member(alpha=1, multiplier=1))
        >>> sums.add(torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log(), "the example")
        >>> sums.end_block()
        >>> sums.result().variance
        tensor([0.0400, 0.0400])
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self._whole, self._block = _Sums(member), _Sums(member)
        self._blocks = Moments()

    def add(self, logits: Tensor, where: str) -> None:
        """Adds logits [S, ..., V] of samples; `where` they come from is for messages."""
        self._block.add(sample_log_probs(logits, self.member, where))

    def end_block(self) -> None:
        """Closes an independent block of samples."""
        found = self._block.uncertainty()
        self._blocks.add(*(getattr(found, name)[None] for name in _OF_CLASSES + _OF_TARGETS))
        self._whole.merge(self._block)
        self._block = _Sums(self.member)

    def result(self) -> Uncertainty:
        """The uncertainty, once every block is closed."""
        found, count, errors = self._whole.uncertainty(), self._blocks.count, None
        if count > 1:
            # Of the mean of all blocks: the spread of one over the root of their number.
            values = [(v / (count - 1)).sqrt() for v in self._blocks.variances()]
            values[0] = values[0].masked_fill(found.log_probs.isneginf(), 0)  # impossible classes
            # Blocks may differ in the class of the largest probability: follow that of the whole.
            top = found.log_probs.argmax(-1, keepdim=True)
            values[2] = found.confidence * values[0].gather(-1, top).squeeze(-1)
            fields: dict[str, Any] = dict(zip(_OF_CLASSES + _OF_TARGETS, values))
            errors = Uncertainty(self.member, **fields)
        return dataclasses.replace(found, errors=errors)

    @staticmethod
    def join(parts: Sequence[Uncertainty], dim: int) -> Uncertainty:
        """The uncertainty of all examples."""
        return Uncertainty.join(parts, dim)


class _Sums:
    """Sums over samples from which an `Uncertainty` follows."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self._powers = PowerSums(tuple({member.alpha, 1.0}), entropy=True)
        self._probabilities = Moments()

    def add(self, lp: Tensor) -> None:
        """Adds log-probabilities [S, ..., V]."""
        self._powers.add(lp)
        self._probabilities.add(lp.exp())

    def merge(self, other: _Sums) -> None:
        """Adds the samples of another, which must not be used after."""
        self._powers.merge(other._powers)
        self._probabilities.merge(other._probabilities)

    def uncertainty(self) -> Uncertainty:
        """Of all samples that were added, without errors."""
        log_means = self._powers.log_mean(self.member.alpha)
        log_probs = member_log_probs(log_means, self.member)
        assert self._powers.entropy is not None
        expected = self._powers.entropy / self._powers.count
        return Uncertainty(
            self.member,
            log_probs,
            log_probs.amax(-1).exp(),
            _entropy(log_probs),
            expected,
            self._disagreement(log_means.double(), expected),
            self._probabilities.variances()[0],
        )

    def _disagreement(self, log_means: Tensor, expected: Tensor) -> Tensor:
        alpha = self.member.alpha
        if alpha == 1:
            found = _entropy(log_means) - expected
        elif alpha < GEOMETRIC:
            found = -log_means.logsumexp(-1)
        else:
            found = -torch.expm1(alpha * log_means.logsumexp(-1)) / (alpha * (1 - alpha))
        return found.clamp_min(0).to(expected.dtype)


class Moments:
    """Streaming means and variances of tensors over a leading dimension (Chan et al., 1979).

    Example:
        >>> moments = Moments()
        >>> moments.add(torch.tensor([1.0, 2.0]))
        >>> moments.add(torch.tensor([6.0]))
        >>> moments.variances()[0]
        tensor(4.6667)
    """

    def __init__(self) -> None:
        self.count = 0
        self._means: list[Tensor] = []
        self._squares: list[Tensor] = []  # sums of squared deviations from the mean

    def add(self, *values: Tensor) -> None:
        """Adds values [S, ...] of one or more quantities."""
        chunk = Moments()
        chunk.count = len(values[0])
        chunk._means = [value.mean(0) for value in values]
        chunk._squares = [
            (value - mean).square().sum(0) for value, mean in zip(values, chunk._means)
        ]
        self.merge(chunk)

    def merge(self, other: Moments) -> None:
        """Adds the values of another, which must not be used after."""
        if not self.count:
            self.count, self._means, self._squares = other.count, other._means, other._squares
            return
        count = self.count + other.count
        for i, (mean, square) in enumerate(zip(other._means, other._squares)):
            apart = mean - self._means[i]
            self._means[i] = self._means[i] + apart * (other.count / count)
            between = apart.square() * (self.count * other.count / count)
            self._squares[i] = self._squares[i] + square + between
        self.count = count

    def variances(self) -> list[Tensor]:
        """The population variance of each quantity."""
        return [square / self.count for square in self._squares]


def _entropy(log_probs: Tensor) -> Tensor:
    return torch.special.entr(log_probs.exp()).sum(-1)
