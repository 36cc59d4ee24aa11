"""From log-probabilities of mask samples to results of members that temper each sample.

Members that temper each component of a mixture are the same but for how a sample is tempered.

Legend: M multipliers, A alphas above 0, J nodes of temperature, S samples of a chunk, N targets,
V classes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods.categorical_sums import at_targets, entropy
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.family.power_mean import PowerSums
from afterdrop.family.temperature import Nodes


class SampleTemper:
    """Accumulates samples for members whose temperature acts on each sample before averaging.

    Costs an accumulator per alpha and node of temperature: a grid fixed before the passes.

    Args:
        alphas: Alphas (`Grid.tempered_alphas`).
        targets: [N].
        nodes: Nodes of temperature.
        blocks: Independent blocks of samples; the first half of them is one half.
        temper: Log-probabilities of samples at an inverse temperature, from those at 1; by default
            the temperature acts on each sample.
    """

    group: Group = "tempered"

    def __init__(
        self,
        alphas: tuple[float, ...],
        targets: Tensor,
        nodes: Nodes,
        blocks: int,
        temper: Callable[[Tensor, float], Tensor] | None = None,
    ) -> None:
        self.alphas, self._temper = alphas, temper or _temper_samples
        self.targets, self.inverse = targets, nodes.inverse()
        self._half_size = max(1, blocks // 2)
        self._closed = 0
        self._sums = [PowerSums(self.alphas) for _ in self.inverse]
        self._bounds = [torch.zeros(()) for _ in self.inverse]
        self._count = 0
        self._first: list[PowerSums] | None = None
        self._halves: list[Tensor] = []

    def add(self, lp: Tensor) -> None:
        """Adds log-probabilities [S, M, N, V]."""
        for j, b in enumerate(self.inverse.tolist()):
            tempered = self._temper(lp, b)
            self._sums[j].add(tempered)
            self._bounds[j] = self._bounds[j] + at_targets(tempered, self.targets).double().sum(0)
        self._count += lp.shape[0]

    def end_block(self) -> None:
        """Closes an independent block; after half of them, the first half is set aside."""
        self._closed += 1
        if self._closed % self._half_size:
            return
        self._halves.append(self._xe(self._sums))
        if self._first is None:
            self._first = self._sums
            self._sums = [PowerSums(self.alphas) for _ in self.inverse]
        else:
            for whole, half in zip(self._first, self._sums):
                whole.merge(half)

    def _log_p(self, sums: PowerSums, alpha: float) -> tuple[Tensor, Tensor]:
        log_means = sums.log_mean(alpha)
        log_z = log_means.logsumexp(-1, keepdim=True)
        return log_means - log_z, log_z.squeeze(-1)

    def _xe(self, sums: list[PowerSums]) -> Tensor:
        """[M, A, J, N]."""
        rows = [
            torch.stack([-at_targets(self._log_p(s, a)[0], self.targets).double() for s in sums], 1)
            for a in self.alphas
        ]
        return torch.stack(rows, 1)

    def results(self) -> Results:
        """Per-target results, each [M, A, J, N] but for the bound [M, J, N]."""
        sums = self._sums if self._first is None else self._first
        xe = self._xe(sums)
        names = ("log_z", "peak", "square", "class", "entropy")
        columns: dict[str, list[Tensor]] = {name: [] for name in names}
        for alpha in self.alphas:
            cells: dict[str, list[Tensor]] = {name: [] for name in columns}
            for s in sums:
                log_p, log_z = self._log_p(s, alpha)
                peak, top = log_p.max(-1)
                cells["log_z"].append(log_z.double())
                cells["peak"].append(peak.double())
                cells["square"].append((2 * log_p).logsumexp(-1).double())
                cells["class"].append(top.int())
                cells["entropy"].append(entropy(log_p, torch.zeros_like(peak).unsqueeze(-1)))
            for name, tensors in cells.items():
                columns[name].append(torch.stack(tensors, 1))
        out = {name: torch.stack(tensors, 1) for name, tensors in columns.items()}
        out["xe"] = xe
        out["bound"] = torch.stack([b / self._count for b in self._bounds], 1)
        if len(self._halves) == 2:
            out["half"] = torch.stack([h - xe for h in self._halves], -3).float()
        return out


def _temper_samples(lp: Tensor, inverse: float) -> Tensor:
    return (lp * inverse).log_softmax(-1)
