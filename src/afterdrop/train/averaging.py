"""The running mean of the weights after every step, once it has been started.

    mean_n = mean_{n−1} + (Θ_n − mean_{n−1}) / n

Training itself is not affected; validation and the best checkpoint use the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The mean of a model's parameters over steps.

    Args:
        model: The model whose parameters `update` reads.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(model)
        >>> for value in (1.0, 2.0, 6.0):
        ...     _ = nn.init.constant_(model.weight, value)
        ...     average.update()
        >>> with average.in_place():
        ...     model.weight.item()
        3.0
        >>> model.weight.item()
        6.0
    """

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters: list[Tensor] = list(model.parameters())
        self._means = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current parameters to the mean."""
        self.count += 1
        torch._foreach_lerp_(self._means, self._parameters, 1 / self.count)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gives the model the mean as its weights; before any update, nothing changes."""
        if self.count == 0:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def tensors(self) -> dict[str, Tensor]:
        """The mean by parameter name."""
        return dict(zip(self._names, self._means))

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """Groups of tensors of a checkpoint."""
        return {"average": self.tensors()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], count: int) -> None:
        """Continues from a saved mean over `count` steps."""
        self.count = count
        for name, mean in zip(self._names, self._means):
            mean.copy_(tensors[name])

    def _swap(self) -> None:
        for index, (parameter, mean) in enumerate(zip(self._parameters, self._means)):
            # The tensors are exchanged without a copy; the optimiser's parameter stays the same.
            self._means[index], parameter.data = parameter.data, mean
