"""Penalties of the objective that Melis et al. (2018, §6) relate to the dropout bound.

    fraternal             ½(XE₁ + XE₂) + κ mean (l₁ − l₂)²     two masks, one start       1711.00066
    expectation-linear    XE + κ mean (l − l̄)²                 l̄: logits without dropout  1609.08017
    activation            XE + α mean (mask∘h)²                h: output of the stack     1708.01009
    temporal activation   XE + β mean (h_t+1 − h_t)²           h without its dropout      1708.01009

The last column has arXiv numbers. Gradients pass through both sides of a difference. Means are over
time, rows and classes (or units), and coefficients are those published for a loss that is a mean
over time. The loss of `objective` is a sum over time, so what is added to it is the penalty times
the time steps of the window.

For independent masks E mean (l₁ − l₂)² is twice the mean variance of a logit, and E mean (l − l̄)²
is that variance plus the squared bias of l̄. Where the logits are linear in the features f,
‖l₁ − l₂‖² = δᵀ(EᵀE)δ with δ = f₁ − f₂ and E the softmax table: no pass over the logits.

Legend: B rows, S samples, time (t) steps, V classes, E features, H hidden units.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from afterdrop.models.language_model import Activations, LanguageModel
from afterdrop.train.sections import PENALTIES, ObjectiveSection


class StepLoss(NamedTuple):
    """The loss of a step; the numbers of all ranks sum to those of the batch.

    Attributes:
        data: The data term, summed over time and averaged over the batch.
        effective: The mean effective number of samples; None with one sample.
        penalties: What each penalty of `active_penalties` adds to the loss [P]; None without any.
    """

    data: Tensor
    effective: Tensor | None = None
    penalties: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """What is differentiated: the data term and all penalties."""
        return self.data if self.penalties is None else self.data + self.penalties.sum()

    def numbers(self) -> Tensor:
        """The data term, effective samples and penalties, as far as they are there.

        Example:
            >>> StepLoss(torch.tensor(2.0), penalties=torch.tensor([0.5])).numbers()
            tensor([2.0000, 0.0000, 0.5000])
        """
        found = [self.data.detach()]
        if self.effective is not None or self.penalties is not None:
            found.append(torch.zeros_like(found[0]) if self.effective is None else self.effective)
        if self.penalties is not None:
            found += self.penalties.detach().unbind()
        return torch.stack(found)


def active_penalties(section: ObjectiveSection) -> dict[str, float]:
    """The coefficient of each penalty that is above 0, by its name.

    Example:
        >>> active_penalties(ObjectiveSection(batch_size=2, window=5, activation_penalty=2.0))
        {'activation': 2.0}
    """
    found = {name: getattr(section, f"{name}_penalty") for name in PENALTIES}
    return {name: coefficient for name, coefficient in found.items() if coefficient > 0}


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Drops nothing in the passes inside; the model is in training mode before and after.

    Example:
        >>> with without_dropout(model := nn.Dropout(0.5)):
        ...     model(torch.ones(2))
        tensor([1., 1.])
        >>> model.training
        True
    """
    model.eval()
    try:
        yield
    finally:
        model.train()


def logit_distance(delta: Tensor, table_VE: Tensor) -> Tensor:
    """Mean over classes of the squared difference of two logits, from features alone.

    Args:
        delta: [..., E], the difference of the features.
        table_VE: The softmax table of both.

    Returns:
        δᵀ(EᵀE)δ / V, in the shape of delta without its last dimension.

    Example:
        >>> table = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
        >>> delta = torch.tensor([1.0, -1.0])
        >>> logit_distance(delta, table), (table @ delta).square().mean()
        (tensor(1.6667), tensor(1.6667))
    """
    gram_EE = table_VE.t() @ table_VE
    return ((delta @ gram_EE) * delta).sum(-1) / len(table_VE)


class TextPasses(NamedTuple):
    """The passes over one window that the penalties compare.

    Attributes:
        first: The pass with the masks of the step; its state is carried.
        second: The pass with the other masks of fraternal dropout.
        still: The pass without dropout of expectation-linear dropout.
    """

    first: Activations
    second: Activations | None = None
    still: Activations | None = None


def text_penalties(
    section: ObjectiveSection, model: LanguageModel, passes: TextPasses, share: float
) -> Tensor | None:
    """What each active penalty adds to the loss of a window [P]; None without any.

    Args:
        section: The coefficients.
        model: The model that made the passes.
        passes: The passes over this rank's rows.
        share: This rank's share of the rows of the batch.

    Example:
        >>> from afterdrop.models import LanguageModelConfig
        >>> model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(4,)))
        >>> section = ObjectiveSection(2, window=3, activation_penalty=2.0)
        >>> passes = TextPasses(model.activations(torch.ones(2, 3, dtype=torch.int64)))
        >>> text_penalties(section, model, passes, share=1.0).shape
        torch.Size([1])
    """
    coefficients = active_penalties(section)
    if not coefficients:
        return None
    first, time = passes.first, len(passes.first.top_tBH)
    found: list[Tensor] = []
    for name, coefficient in coefficients.items():
        if name == "fraternal":
            assert passes.second is not None
            mean = _distance(model, first, passes.second)
        elif name == "expectation_linear":
            assert passes.still is not None
            mean = _distance(model, first, passes.still)
        elif name == "activation":
            mean = first.dropped_tBH.square().mean()
        else:
            mean = first.top_tBH.diff(dim=0).square().mean()
        found.append(coefficient * time * share * mean)
    return torch.stack(found)


def _distance(model: LanguageModel, one: Activations, other: Activations) -> Tensor:
    """Mean squared difference of the logits; by way of features if the tables are the same."""
    if one.rows_V1 is None and other.rows_V1 is None:
        return logit_distance(one.features - other.features, model.softmax_table).mean()
    return (model.logits(one) - model.logits(other)).square().mean()


def image_penalties(
    section: ObjectiveSection, difference: Tensor | None, share: float
) -> Tensor | None:
    """What the active penalty adds to the loss of images [1]; None without one.

    Few classes make the logits cheaper than the Gram matrix of the table.

    Args:
        section: The coefficients; a classifier has one of the first two at most.
        difference: l₁ − l₂ or l − l̄ of this rank's images [B, V].
        share: This rank's share of the batch.

    Example:
        >>> section = ObjectiveSection(2, fraternal_penalty=0.1)
        >>> image_penalties(section, torch.ones(2, 3), share=1.0)
        tensor([0.1000])
    """
    coefficients = active_penalties(section)
    if not coefficients or difference is None:
        return None
    (coefficient,) = coefficients.values()
    return (coefficient * share * difference.square().mean()).unsqueeze(0)
