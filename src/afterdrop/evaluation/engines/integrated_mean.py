"""The geometric mean of a language model with output dropout integrated out.

Alpha 0 is the softmax of the mean logits, which are linear in the features before output dropout,
and the expectation of those under output dropout is the features themselves. That is a second
estimate under a name of its own; bounds use the one on the same masks.

Legend: M multipliers, S samples of a chunk, N targets, H features, V token types.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afterdrop.evaluation.likelihoods import Partitions
from afterdrop.evaluation.likelihoods.categorical_sums import (
    coarse_xe,
    cross_entropies,
    distribution,
)
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.family.temperature import COARSE
from afterdrop.models import LanguageModel

_ELEMENTS = 2**26  # log-probabilities at a time


def integrates(protocol: Protocol, model: nn.Module) -> bool:
    """Whether alpha 0 is asked for and the softmax allows computing it from mean features."""
    assert isinstance(model, LanguageModel)
    config = model.config
    softmax_drops = config.embedding_rows == "input_and_softmax" and config.embedding_dropout
    linear = config.softmax_components == 1  # log-probabilities of a mixture are not
    return 0.0 in protocol.grid.alphas and linear and not softmax_drops


class IntegratedMean:
    """Alpha 0 from mean features: dropout of the output and its projection integrates out exactly.

    Args:
        model: The language model.
        protocol: The evaluation.
        targets: [N] those that count.
        counts: Which of all targets do.
        features: Gives the features [time, rows, H] of the last pass.
        partitions: The sum over classes at temperatures.
        elements: Log-probabilities at a time.
    """

    group: Group = "integrated"

    def __init__(
        self,
        model: LanguageModel,
        protocol: Protocol,
        targets: Tensor,
        counts: Tensor,
        features: Callable[[], Tensor],
        partitions: Partitions,
        elements: int = _ELEMENTS,
    ) -> None:
        self.model, self.protocol, self.targets, self.counts = model, protocol, targets, counts
        self._features, self._partitions, self._elements = features, partitions, elements
        self._half_size = max(1, protocol.plan.blocks // 2)
        self._halves: list[tuple[Tensor, int]] = []
        self._sum: Tensor | None = None
        self._count = self._closed = 0

    def add(self, predictions: Tensor) -> None:
        """Adds the features that gave these predictions [S, M, N, V]."""
        S, M = predictions.shape[:2]
        y = self._features().transpose(0, 1)  # [rows, time, H], rows = M · S · examples
        y = y.unflatten(0, (M, S, -1)).sum(1).flatten(1, 2)[:, self.counts]
        self._sum = y if self._sum is None else self._sum + y
        self._count += S

    def end_block(self) -> None:
        """Closes an independent block; half of the blocks make a half."""
        self._closed += 1
        if self._closed % self._half_size == 0:
            assert self._sum is not None
            self._halves.append((self._sum, self._count))
            self._sum, self._count = None, 0

    def _log_probs(self, total: Tensor, count: int) -> Tensor:
        features, model = total / count, self.model
        if model.projection is not None:
            features = F.linear(features, model.projection)
        return model.output(features).float().log_softmax(-1)

    def results(self) -> Results:
        """Per-target results [M, ...]."""
        groups, targets = self._halves[0][0].shape[:2]
        step = max(1, self._elements // (groups * self.protocol.num_classes))
        parts = [self._part(slice(at, at + step)) for at in range(0, max(targets, 1), step)]
        return {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}

    def _part(self, some: slice) -> Results:
        """Results of some targets, whose log-probabilities fit the memory."""
        nodes, targets = self.protocol.nodes, self.targets[some]
        halves = [(total[:, some], count) for total, count in self._halves]
        whole = sum(total for total, _ in halves), sum(n for _, n in halves)
        lp = self._log_probs(*whole)  # type: ignore[arg-type]
        out = distribution(lp, targets, nodes, self._partitions)
        if len(halves) == 2:
            coarse = torch.cat([nodes.inverse(COARSE), torch.ones(1, dtype=torch.float64)])
            one = (out["one"] - out["target"]).unsqueeze(-2)
            xe = torch.cat([coarse_xe(out, nodes), one], -2)
            parts = [
                cross_entropies(self._log_probs(*half), targets, coarse, self._partitions) - xe
                for half in halves
            ]
            out["half"] = torch.stack(parts, 1).float()
        return out
