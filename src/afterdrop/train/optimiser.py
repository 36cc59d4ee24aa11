"""Adam without momentum, with epsilon in the place where TensorFlow has it.

    v ← β2 v + (1 − β2) g²
    Θ ← Θ − lr √(1 − β2ᵗ) g / (√v + ε)          TensorFlow, lamb, `AdamTF`
    Θ ← Θ − lr g / (√(v / (1 − β2ᵗ)) + ε)       torch.optim.Adam with betas (0, β2)

In the second form the effective ε at step t is smaller by a factor of √(1 − β2ᵗ). With ε = 1e-8
this is negligible; with the 1e-5 of enwik8, weights with small gradients move less in the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor

from afterdrop.train.sections import OptimiserSection


class AdamTF(torch.optim.Optimizer):
    """Adam with β1 = 0, as in lamb ("rmsprop" there).

    Args:
        params: The parameters.
        lr: Learning rate.
        beta2: Decay of the squared gradients' mean.
        epsilon: Added to the root of the uncorrected mean.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> optimiser = AdamTF([weight], lr=0.1)
        >>> (3 * weight).sum().backward()
        >>> optimiser.step()
        >>> weight.detach()  # the first step is the sign of the gradient
        tensor([0.9000])
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, beta2: float = 0.999, epsilon: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "beta2": beta2, "epsilon": epsilon, "step": 0})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; parameters without a gradient are not changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        group["step"] += 1
        grads = [p.grad for p in params]
        for p in params:
            if not self.state[p]:
                self.state[p]["square"] = torch.zeros_like(p)
        squares = [self.state[p]["square"] for p in params]
        beta2, epsilon = group["beta2"], group["epsilon"]
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, epsilon)
        size = group["lr"] * math.sqrt(1 - beta2 ** group["step"])
        torch._foreach_addcdiv_(params, grads, roots, value=-size)


def build_optimiser(
    parameters: Iterable[Tensor], section: OptimiserSection
) -> torch.optim.Optimizer:
    """Builds the optimiser of a configuration.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> type(build_optimiser([weight], OptimiserSection(0.1, "adam", beta1=0.9))).__name__
        'Adam'
    """
    if section.name == "adam-tf":
        return AdamTF(parameters, section.learning_rate, section.beta2, section.epsilon)
    betas = (section.beta1, section.beta2)
    return torch.optim.Adam(parameters, section.learning_rate, betas, section.epsilon)
