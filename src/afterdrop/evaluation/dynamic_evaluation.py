"""Dynamic evaluation: a language model that learns from the text that it has just predicted.

The text is read in windows. Each is predicted first, and then changes the weights:

    θ ← θ − η g/(m + ε) + min(1, κ m/m̄)(θ₀ − θ)                (Krause et al., 2018, RMS form)

g is the gradient of the window's mean XE per token, m the root mean square of such gradients over
windows of the training text, at the trained weights θ₀ and without dropout. m̄ is the mean of m:
over tensors of each tensor's mean (Krause's code), or over all elements (lamb). κ pulls the weights
back to θ₀, faster where gradients are usually large. The state that the next window starts from is
that of the prediction.

lamb has the gradient of the sum over the window. Its η and κ mean the same here, and its ε is ours
times the tokens of the window.

Legend: B stripes, L layers, H units.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from afterdrop.data.stripes import IGNORE, EvalStripes
from afterdrop.errors import DataError
from afterdrop.masks.model_guard import guarded
from afterdrop.models import LanguageModel

_LARGEST = 1e6  # no weight of a model that still predicts comes near it


class DivergedWeights(DataError):
    """Dynamic evaluation whose weights have grown beyond all bounds."""


@dataclass(frozen=True)
class DynamicEvaluation:
    """The settings of dynamic evaluation; the defaults are Krause's for PTB and windows of 5.

    Attributes:
        eta: η, the learning rate.
        kappa: κ, the decay towards the trained weights.
        epsilon: ε, added to the root mean square of a gradient.
        mean: How m̄ averages: over "tensors" or over all "elements".
        stripes: Stripes of the training text per gradient of the statistics.
        windows: Windows per stripe of the training text, at most; None reads all of it.

    Example:
        >>> DynamicEvaluation(eta=1e-4).kappa
        0.002
    """

    eta: float = 5e-5
    kappa: float = 2e-3
    epsilon: float = 2e-5
    mean: Literal["tensors", "elements"] = "tensors"
    stripes: int = 100
    windows: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("eta", 0.0), ("kappa", 0.0), ("epsilon", math.ulp(0.0))):
            value = getattr(self, name)
            if not least <= value < math.inf:
                at = "a number of at least 0" if least == 0 else "a positive number"
                raise DataError(f"{name}={value!r} must be {at}, as in {name}=1e-4")
        if self.mean not in ("tensors", "elements"):
            raise DataError(f"mean={self.mean!r} must be 'tensors' or 'elements'")
        if self.stripes < 1 or (self.windows is not None and self.windows < 1):
            raise DataError(
                f"stripes={self.stripes} and windows={self.windows} must be at least 1; they say "
                "how much of the training text the statistics read"
            )


@dataclass(frozen=True)
class GradientScale:
    """How large gradients of training text are.

    Attributes:
        parameters: The weights that adapt.
        roots: m, for each of them.
    """

    parameters: Sequence[Tensor]
    roots: list[Tensor]

    def decay(self, settings: DynamicEvaluation) -> list[Tensor]:
        """min(1, κ m/m̄) of each weight."""
        if settings.mean == "tensors":
            mean = torch.stack([root.mean() for root in self.roots]).mean()
        else:
            mean = torch.cat([root.flatten() for root in self.roots]).mean()
        return [(settings.kappa * root / mean).clamp_max(1.0) for root in self.roots]


def gradient_scale(
    model: LanguageModel,
    training: Tensor,
    eos: int,
    window: int,
    settings: DynamicEvaluation,
    *,
    lines: bool = True,
) -> GradientScale:
    """The root mean square of the gradients of training windows, without dropout.

    Args:
        model: The model, with its trained weights.
        training: [N] the training text.
        eos: The token before the first.
        window: Tokens per window, as in the evaluation.
        settings: How much of the text is read.
        lines: Whether stripes consist of whole lines.

    Example:
        >>> from afterdrop.models import LanguageModelConfig
        >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4,)))
        >>> text = torch.randint(1, 9, (100,))
        >>> scale = gradient_scale(model, text, 0, 5, DynamicEvaluation(stripes=2), lines=False)
        >>> len(scale.roots) == len(list(model.parameters()))
        True
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise DataError("no parameter requires a gradient; dynamic evaluation needs some that do")
    squares = [torch.zeros_like(p) for p in parameters]
    stripes = EvalStripes(training.cpu(), eos, settings.stripes, window, lines=lines)
    count = min(len(stripes), settings.windows or len(stripes))
    state = model.initial_state(settings.stripes)
    with guarded(model):
        for number in range(count):
            gradients, state = window_gradient(model, parameters, *stripes[number], state)
            for square, gradient in zip(squares, gradients):
                square.addcmul_(gradient, gradient, value=1 / count)
    return GradientScale(parameters, [square.sqrt_() for square in squares])


def window_gradient(
    model: LanguageModel, parameters: Sequence[Tensor], tokens: Tensor, targets: Tensor, state: Any
) -> tuple[list[Tensor], Any]:
    """The gradient of a window's mean XE per token, and the state after it."""
    device = model.softmax_bias.device
    with torch.enable_grad():
        logits, after = model(tokens.to(device), state)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORE
        )
        found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]
    return gradients, tuple((h.detach(), c.detach()) for h, c in after)


class DynamicWindows:
    """Windows of a text as batches ((tokens, state), targets); asking for the next one learns.

    Whoever reads them evaluates a window before asking for the next, as `run_evaluation` does.

    Args:
        model: The model, whose weights change.
        stripes: The text, one stripe.
        settings: The settings.
        scale: Of the training text.
    """

    def __init__(
        self,
        model: LanguageModel,
        stripes: EvalStripes,
        settings: DynamicEvaluation,
        scale: GradientScale,
    ) -> None:
        self.model, self.stripes, self.settings, self.scale = model, stripes, settings, scale

    def __len__(self) -> int:
        return len(self.stripes)

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        settings, weights = self.settings, self.scale.parameters
        trained = [p.detach().clone() for p in weights]
        rates = [settings.eta / (root + settings.epsilon) for root in self.scale.roots]
        decays = self.scale.decay(settings)
        state: Any = self.model.initial_state(1)
        for number, (tokens, targets) in enumerate(self.stripes):
            yield (tokens, state), targets
            if number + 1 == len(self.stripes):
                return
            # The same pass as the prediction's, with the same weights, now for its gradient.
            gradients, state = window_gradient(self.model, weights, tokens, targets, state)
            with torch.no_grad():
                for p, gradient, rate, decay, start in zip(
                    weights, gradients, rates, decays, trained
                ):
                    p.add_(decay * (start - p) - rate * gradient)


@contextmanager
def kept_weights(model: LanguageModel) -> Iterator[None]:
    """Restores the weights of a model on exit.

    Raises:
        DivergedWeights: If they have diverged, in the place of an error that follows from it.

    Example:
        >>> from afterdrop.models import LanguageModelConfig
        >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4,)))
        >>> with kept_weights(model), torch.no_grad():
        ...     _ = model.softmax_bias.fill_(7.0)
        >>> model.softmax_bias.max().item()
        0.0
    """
    kept = [p.detach().clone() for p in model.parameters()]
    try:
        yield
        _check_bounded(model, None)
    except DivergedWeights:
        raise
    except DataError as error:
        _check_bounded(model, error)
        raise
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept):
                parameter.copy_(value)


def _check_bounded(model: LanguageModel, cause: DataError | None) -> None:
    if not all(bool((p.abs() < _LARGEST).all()) for p in model.parameters()):
        raise DivergedWeights(
            "the weights diverged in dynamic evaluation; lower eta, or raise kappa or epsilon"
        ) from cause
