"""The geometric mean of a language model with output dropout integrated out.

Alpha 0 is the softmax of the mean logits, these are linear in the features before output dropout,
and its expectation is those features themselves. That is a second estimate under a name of its own.

Legend: L multipliers, S samples, N targets, H features, V token types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from afterdrop.evaluation.accumulators import Results, coarse_xe, cross_entropies, distribution
from afterdrop.family.temperature import COARSE, Nodes
from afterdrop.models import LanguageModel

_ELEMENTS = 2**26  # log-probabilities at a time

if TYPE_CHECKING:
    from afterdrop.evaluation.engines.text import LanguageWorker


class Integrated:
    """Alpha 0 from mean features: output dropout and its projection's integrate out exactly."""

    def __init__(self, worker: LanguageWorker, targets: Tensor, counts: Tensor) -> None:
        self.worker, self.targets, self.counts = worker, targets, counts
        self._half_size = max(1, worker.protocol.plan.blocks // 2)
        self._halves: list[tuple[Tensor, int]] = []
        self._sum: Tensor | None = None
        self._count = self._closed = 0

    def add(self, lp: Tensor) -> None:
        """Adds the features that gave these log-probabilities [S, L, N, V]."""
        S, L = lp.shape[:2]
        y = self.worker.features().transpose(0, 1)  # [rows, time, H], rows = L · S · examples
        y = y.unflatten(0, (L, S, -1)).sum(1).flatten(1, 2)[:, self.counts]
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
        features, model = total / count, self.worker.model
        assert isinstance(model, LanguageModel)
        if model.projection is not None:
            features = F.linear(features, model.projection)
        return model.output(features).float().log_softmax(-1)

    def results(self) -> Results:
        """Per-target results [L, ...] under the name `integrated`."""
        groups, targets = self._halves[0][0].shape[:2]
        step = max(1, _ELEMENTS // (groups * self.worker.protocol.num_classes))
        parts = [self._part(slice(at, at + step)) for at in range(0, max(targets, 1), step)]
        return {
            f"integrated_{name}": torch.cat([part[name] for part in parts], -1) for name in parts[0]
        }

    def _part(self, some: slice) -> Results:
        """Results of some targets, whose log-probabilities fit the memory."""
        nodes: Nodes = self.worker.protocol.nodes
        targets = self.targets[some]
        halves = [(total[:, some], count) for total, count in self._halves]
        whole = sum(total for total, _ in halves), sum(n for _, n in halves)
        lp = self._log_probs(*whole)  # type: ignore[arg-type]
        out = distribution(lp, targets, nodes)
        if len(halves) == 2:
            coarse = torch.cat([nodes.inverse(COARSE), torch.ones(1, dtype=torch.float64)])
            one = (out["one"] - out["target"]).unsqueeze(-2)
            xe = torch.cat([coarse_xe(out, nodes), one], -2)
            parts = [cross_entropies(self._log_probs(*h), targets, coarse) - xe for h in halves]
            out["half"] = torch.stack(parts, 1).float()
        return out
