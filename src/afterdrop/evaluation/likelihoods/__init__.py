"""Likelihoods: what depends on the kind of target, behind one interface.

A likelihood reads targets and outputs, turns outputs into predictions, accumulates them over mask
samples, and says how its results follow the temperature. Estimates, errors, selection, bounds and
files do not know which likelihood they serve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from afterdrop.evaluation.request import Protocol as EvaluationProtocol
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.family.member import Member
from afterdrop.family.temperature import Nodes
from afterdrop.masks.model_call import LogitsPlace

Partitions = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Accumulator(Protocol):
    """Takes predictions of samples, block by block, and gives per-target results.

    Attributes:
        group: Which results of Scores these are.
    """

    group: Group

    def add(self, predictions: Tensor, /) -> None:
        """Adds predictions [S, M, N, V]."""

    def end_block(self) -> None:
        """Closes an independent block of samples."""

    def results(self) -> Results:
        """Per-target results by field, once every block is closed."""


class Likelihood(Protocol):
    """What depends on the kind of target.

    Attributes:
        logits: Where the output holds what the likelihood reads; None for its only tensor.
    """

    @property
    def logits(self) -> LogitsPlace | None:
        """Where the output holds what the likelihood reads."""

    @property
    def ignored(self) -> float:
        """What stands for a target that does not count."""

    def read_targets(self, targets: Any, number: int) -> Tensor:
        """Targets as given, checked, on the CPU, with the batch dimension first."""

    def counts(self, targets: Tensor) -> Tensor:
        """Which targets count, flattened."""

    def read_output(self, output: Any, targets: Tensor, copies: int) -> Tensor:
        """What a model returned for `copies` of the targets (on the CPU): [copies, N, V]."""

    def labels(self, targets: Tensor) -> Tensor | None:
        """[N] the number of each counted target's label, if examples have several."""

    def read_logits(self, output: Any) -> tuple[Tensor, int]:
        """An output [..., V] without targets, and its batch dimension, for a predictor."""

    def prediction(self, found: Tensor, member: Member) -> Any:
        """What a predictor returns, from the mean of a member's samples [..., V]."""

    def check_axes(self, output: Any, targets: Tensor) -> None:
        """Refuses an output that can be read in several ways."""

    def check_targets(self, targets: Tensor, classes: int, number: int) -> None:
        """Refuses targets that the model cannot give."""

    def check_output(self, output: Tensor) -> None:
        """Refuses outputs [N, V] that cannot be evaluated."""

    def bracket(self, output: Tensor, targets: Tensor) -> Nodes:
        """Temperatures that suit a first deterministic output."""

    def predict(self, output: Tensor, where: str | None, room: Tensor | None = None) -> Tensor:
        """Log-probabilities of an output [..., V], written into `room` where that is given."""

    def deterministic(
        self, output: Tensor, targets: Tensor, nodes: Nodes, partitions: Partitions
    ) -> Results:
        """Results by field of an output [N, V] without dropout, on its device."""

    def accumulators(
        self, protocol: EvaluationProtocol, targets: Tensor, partitions: Partitions
    ) -> list[Accumulator]:
        """Where the predictions of samples go."""

    def target_bytes(self, protocol: EvaluationProtocol) -> int:
        """Bytes that accumulators take per target and multiplier."""
