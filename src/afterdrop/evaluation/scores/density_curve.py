"""One member's results as functions of the temperature, where targets are numbers.

Legend: N targets, J nodes, R resamples, G examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from afterdrop.evaluation.scores.curves import Over, within
from afterdrop.evaluation.scores.schema import SUMMARIES
from afterdrop.family.estimates import Values
from afterdrop.family.temperature import Nodes, fit_interpolated


@dataclasses.dataclass(frozen=True)
class DensityCurve:
    """A member at nodes of the temperature, interpolated in between.

    Attributes:
        fields: `nll_at` [J, N], and summaries at every second node; then, if `exact`, at T = 1.
        half: [2, J, N] NLL of each half of the samples minus NLL, or None.
        nodes: The nodes.
        exact: Whether the last entries are those of T = 1.
        num_samples: K, or 0.
    """

    fields: Mapping[str, Tensor]
    half: Tensor | None
    nodes: Nodes
    exact: bool
    num_samples: int

    def xe(self, temperature: float) -> Values:
        """Negative log-likelihoods of the targets."""
        whole = self._at(self.fields["nll_at"], temperature)
        halves = None
        if self.half is not None:
            halves = whole + self._at(self.half, temperature)
        return Values(whole.masked_fill(whole.isnan(), math.inf), halves, self.num_samples)

    def summary(self, field: str, temperature: float) -> Tensor:
        """[N] what is known of the distribution, such as `mean_at`."""
        return self._at(self.fields[field], temperature, SUMMARIES)

    def _at(self, values: Tensor, temperature: float, step: int = 1) -> Tensor:
        """Values [..., J, N] at a temperature."""
        if temperature == 1 and self.exact:
            return values[..., -1, :].double()
        weights = self.nodes.weights(within(temperature, self.nodes), step)
        return weights @ self._nodes_only(values).double()

    def _nodes_only(self, values: Tensor) -> Tensor:
        return values[..., :-1, :] if self.exact else values

    def fit(self, clusters: Tensor, weights: Tensor, k: float) -> tuple[Tensor, Tensor, Tensor]:
        """For each row of weights [R, G] over examples: best temperature, NLL there, if at edge."""
        nll = self._nodes_only(self.fields["nll_at"])
        over = Over(nll.isfinite().all(0), clusters, weights)
        means = over.mean(nll)
        if self.half is not None and k != self.num_samples:
            means = means + over.cost(self._nodes_only(self.half), self.num_samples / k)
        temperature, edge = fit_interpolated(means, self.nodes)
        found = (self.nodes.weights(1 / temperature) * means).sum(-1)
        return temperature, found.masked_fill(over.impossible, math.inf), edge


def interpolated(values: Tensor, temperature: float, nodes: Nodes) -> Tensor:
    """Values [J, N] at the nodes, at a temperature."""
    weights: Tensor = nodes.weights(within(temperature, nodes))
    return weights @ values[: nodes.count].to(torch.float64)
