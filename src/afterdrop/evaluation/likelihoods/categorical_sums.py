"""From log-probabilities of mask samples to per-target results, streaming over the samples.

Legend: M multipliers, A alphas, J nodes of temperature, K samples, S samples of a chunk, N targets,
V classes. Per-target results have N as their last dimension, so that results of
disjoint targets concatenate.

One accumulator per alpha holds sums over samples for every class, so memory does not grow with K;
only the targets' own log-probabilities are kept for all samples (K · M · N floats), because the
bounds need their extremes and moments to full precision.
"""

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods import Partitions
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.family.exponential import exp_times
from afterdrop.family.power_mean import LOWEST, PowerSums, log_power_mean
from afterdrop.family.temperature import COARSE, Nodes
from afterdrop.transfer import constant

_MOMENTS_AT_ONCE = 2**19  # log-probabilities of targets at a time: 4 MiB, copied a few times


def at_targets(lp: Tensor, targets: Tensor) -> Tensor:
    """The entries of the targets along the last dimension."""
    index = targets.expand(lp.shape[:-1]).unsqueeze(-1)
    return lp.gather(-1, index).squeeze(-1)


def distribution(
    log_means: Tensor, targets: Tensor, nodes: Nodes, partitions: Partitions
) -> Results:
    """What later temperatures need of log M [..., N, V]: target, peak, class, partitions.

    `one` and `two` are L(1) and L(2), exact, and `entropy` is that at T = 1: there nothing is
    interpolated, whatever the bracket.
    """
    at_target = at_targets(log_means, targets).double()
    inverse = torch.cat([nodes.inverse(), torch.tensor([1.0, 2.0], dtype=torch.float64)])
    G, peak = partitions(log_means, inverse)
    top = peak.double()
    return {
        "target": at_target,
        "peak": top,
        "class": log_means.argmax(-1).int(),
        "partition": G[:-2].movedim(0, -2).float(),
        "one": G[-2].double() + top,
        "two": G[-1].double() + 2 * top,
        "entropy": entropy(log_means, (G[-2] + peak).unsqueeze(-1)),
    }


def entropy(log_means: Tensor, log_z: Tensor) -> Tensor:
    """Entropy of the distribution M/Z, from log M [..., V] and log Z [..., 1]."""
    log_p = (log_means - log_z).clamp_min_(LOWEST)
    return -torch.linalg.vecdot(exp_times(log_p, 1.0), log_p).double()


def coarse_xe(part: Results, nodes: Nodes) -> Tensor:
    """XE [..., Jc, N] at the coarse nodes, from what `distribution` keeps."""
    G = part["partition"][..., ::COARSE, :].double()
    inverse = constant(nodes.inverse(COARSE), G.device, torch.float64).view(-1, 1)
    return G + inverse * (part["peak"] - part["target"]).unsqueeze(-2)


def cross_entropies(
    log_means: Tensor, targets: Tensor, inverse: Tensor, partitions: Partitions
) -> Tensor:
    """XE [..., J, N] of log M [..., N, V] at inverse temperatures."""
    G, peak = partitions(log_means, inverse)
    below = (peak - at_targets(log_means, targets)).double()
    inverse = constant(inverse, below.device, torch.float64).view(-1, *[1] * below.dim())
    return (G.double() + inverse * below).movedim(0, -2)


def target_moments(lp_K: Tensor, alphas: tuple[float, ...]) -> Results:
    """What the bounds need of the samples' own log-probabilities of the targets [K, M, N]."""
    powers = {1.0, 2.0, *alphas, *(2 * a for a in alphas)}
    moment = {a: log_power_mean(lp_K, a, bounded=False) for a in powers}
    return {
        "bound": lp_K.mean(0),
        "lowest": lp_K.amin(0),
        "highest": lp_K.amax(0),
        "mean": moment[1.0],
        "square": moment[2.0],
        "target": torch.stack([moment[a] for a in alphas], 1),
        "second": torch.stack([moment[2 * a] for a in alphas], 1),
    }


class MeanTemper:
    """Accumulates samples for members whose temperature acts on the averaged distribution.

    Args:
        alphas: The alphas of the grid.
        targets: [N].
        nodes: Nodes of temperature.
        blocks: Independent blocks of samples; the last two merges are the halves.
        partitions: The sum over classes at temperatures, plain or by a kernel.
        samples: K, if it is known: then the targets' own log-probabilities get their room at once.
            One tensor per chunk of samples would leave holes in the heap, several times as large.
    """

    group: Group = "sampled"

    def __init__(
        self,
        alphas: tuple[float, ...],
        targets: Tensor,
        nodes: Nodes,
        blocks: int,
        partitions: Partitions,
        samples: int = 0,
    ) -> None:
        self.alphas, self.targets, self.nodes, self.blocks = alphas, targets, nodes, blocks
        self._partitions = partitions
        # Means and second moments of p itself serve the normaliser's approximation.
        self._powers = tuple(sorted({*alphas, 1.0, 2.0}))
        self._block = PowerSums(self._powers, entropy=True)
        self._stack: list[tuple[int, PowerSums]] = []
        self._halves: list[dict[float, Tensor]] = []
        self._curve: dict[int, list[Tensor]] = {}
        self._samples, self._count = samples, 0
        self._at_target = torch.empty(0)  # [K, M, N], of which the first `_count` are there
        self._coarse = torch.cat([nodes.inverse(COARSE), torch.ones(1, dtype=torch.float64)])

    def add(self, lp: Tensor) -> None:
        """Adds log-probabilities [S, M, N, V]."""
        self._block.add(lp)
        count = self._count + len(lp)
        if count > len(self._at_target):
            room = lp.new_empty(max(count, self._samples), *lp.shape[1:-1])
            if self._count:
                room[: self._count] = self._at_target[: self._count]
            self._at_target = room
        self._at_target[self._count : count] = at_targets(lp, self.targets)
        self._count = count

    def end_block(self) -> None:
        """Closes an independent block and merges equal ones, as in binary counting."""
        size, sums = 1, self._block
        self._block = PowerSums(self._powers, entropy=True)
        while True:
            self._note(size, sums)
            if not self._stack or self._stack[-1][0] != size:
                break
            _, before = self._stack.pop()
            before.merge(sums)
            size, sums = 2 * size, before
        self._stack.append((size, sums))

    def _note(self, size: int, sums: PowerSums) -> None:
        if self.blocks > 1 and size == self.blocks // 2:
            self._halves.append({a: self._xe(sums, a, self._coarse) for a in self.alphas})
        if self.blocks > 2:
            one = torch.ones(1, dtype=torch.float64)
            xe = torch.stack([self._xe(sums, a, one)[..., 0, :] for a in self.alphas], -2)
            self._curve.setdefault(size, []).append(xe)

    def _xe(self, sums: PowerSums, alpha: float, inverse: Tensor) -> Tensor:
        return cross_entropies(sums.log_mean(alpha), self.targets, inverse, self._partitions)

    def results(self) -> Results:
        """Per-target results once every block is closed; see `scores.schema`."""
        _, sums = self._stack[-1]
        parts: list[Results] = []
        for alpha in self.alphas:
            log_means = sums.log_mean(alpha)
            part = distribution(log_means, self.targets, self.nodes, self._partitions)
            if self._halves:
                xe = torch.cat(
                    [coarse_xe(part, self.nodes), (part["one"] - part["target"])[..., None, :]], -2
                )
                part["half"] = torch.stack([h[alpha] - xe for h in self._halves], -3).float()
            parts.append(part)
        out = {name: torch.stack([p[name] for p in parts], 1) for name in parts[0]}
        out.update(self._moments(sums))
        if self._curve:
            out["curve"] = torch.stack([torch.stack(v).mean(0) for v in self._curve.values()])
        return out

    def _moments(self, sums: PowerSums) -> Results:
        first, second = sums.log_mean(1.0), sums.log_mean(2.0)
        ratio = (2 * second - first).masked_fill(first.isneginf(), float("-inf"))
        assert sums.entropy is not None
        return self._target_moments() | {
            "spread": (exp_times(ratio, 1.0).sum(-1) - 1).clamp_min_(0.0).double(),
            "mean_entropy": sums.entropy.double() / sums.count,
        }

    def _target_moments(self) -> Results:
        """Moments of the targets' own log-probabilities, in slices: they need float64 copies."""
        lp_K = self._at_target[: self._count]
        step = max(1, _MOMENTS_AT_ONCE // (self._count * lp_K.shape[1]))
        parts = [target_moments(lp.double(), self.alphas) for lp in lp_K.split(step, -1)]
        if len(parts) == 1:
            return parts[0]
        return {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
