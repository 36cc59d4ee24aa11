"""What differs between training a language model and a classifier: data, loss and state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from afterdrop.train.penalties import StepLoss


class Task(Protocol):
    """Gives a model its training losses and validation batches.

    Step n reads the same data whatever was read before; only the carried state has a history.
    """

    @property
    def unit(self) -> str:
        """What a target is: `word`, `char`, `byte` or `image`."""

    @property
    def train_targets(self) -> int:
        """Targets of the training split."""

    @property
    def step_targets(self) -> int:
        """Targets of one step, at most."""

    @property
    def window(self) -> int:
        """Targets that the loss sums over; 1 for images."""

    def build_model(self) -> nn.Module:
        """A new model with weights from torch's global generator."""

    def loss(self, model: nn.Module, step: int) -> StepLoss:
        """The objective of a step without the prior, of this rank's share of the batch."""

    def validation_batches(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [N, V] and targets [N] of the validation split."""

    def carried(self) -> dict[str, Tensor]:
        """The state that is carried from step to step, for a checkpoint."""

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues from what `carried` returned."""

    def identity(self) -> dict[str, Any]:
        """JSON-serialisable facts that identify the training data."""
