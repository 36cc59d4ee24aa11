"""A mean over samples in which each example gets no more samples than it needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from afterdrop.family.member import Member
from afterdrop.selection.member_mean import MemberMean


class StoppingMean:
    """A `MemberMean` whose examples stop at a standard error, after a block of samples.

    What an example gets depends on its own samples alone: if it meets the tolerance after a block,
    it keeps what it has then, whatever the others need.

    Args:
        member: How to predict.
        tolerance: The standard error at which an example gets no more samples.
        part: The numbers of the examples.
        separable: Whether some of the examples can run without the others.

    Attributes:
        running: The numbers of the examples that the next samples are for; empty at the end.
        dim: The batch dimension of the log-probabilities, set before `end_block`.
    """

    def __init__(self, member: Member, tolerance: float, part: range, *, separable: bool) -> None:
        self.tolerance, self.part, self.separable = tolerance, part, separable
        self.running: Sequence[int] = part
        self.dim = 0
        self._mean = MemberMean(member, errors=True)
        self._waiting: list[int] = list(part)  # examples that need more samples
        self._found: Tensor | None = None

    def add(self, logits: Tensor, where: str) -> None:
        """Adds logits [S, ..., V] of samples of the running examples."""
        self._mean.add(logits, where)

    def end_block(self) -> None:
        """Takes the results of the examples that meet the tolerance."""
        if not self.running:
            return
        errors = self._mean.standard_error().movedim(self.dim, 0).reshape(len(self.running), -1)
        met = (errors.amax(1) <= self.tolerance).tolist()
        done = {example for example, enough in zip(self.running, met) if enough}
        self._take([example for example in self._waiting if example in done])
        self._waiting = [example for example in self._waiting if example not in done]
        if not self._waiting:
            self.running = ()
        elif self.separable and len(self._waiting) < len(self.running):
            self._mean.select(self.dim, self._places(self._waiting))
            self.running = self._waiting

    def _take(self, examples: list[int]) -> None:
        """Copies the present results of some examples to their place."""
        now = self._mean.result()
        if self._found is None:
            shape = list(now.shape)
            shape[self.dim] = len(self.part)
            self._found = now.new_empty(shape)
        index = [
            torch.tensor(places, dtype=torch.int64).to(now.device)
            for places in ([e - self.part.start for e in examples], self._places(examples))
        ]
        self._found.index_copy_(self.dim, index[0], now.index_select(self.dim, index[1]))

    def _places(self, examples: list[int]) -> list[int]:
        """Where some examples are in the mean."""
        at = {example: place for place, example in enumerate(self.running)}
        return [at[example] for example in examples]

    def result(self) -> Tensor:
        """Log-probabilities [..., V] of all examples."""
        if self._waiting:
            self._take(self._waiting)
        assert self._found is not None
        return self._found

    @staticmethod
    def join(parts: Sequence[Tensor], dim: int) -> Tensor:
        """Log-probabilities of the examples of all parts."""
        return MemberMean.join(parts, dim)
