"""From the logits of mask samples to per-target results, streaming over the samples.

Legend: L multipliers, A alphas, J nodes of temperature, K samples, S samples of one pass,
N targets, V classes. Per-target results have N as their last dimension, so that results of
disjoint targets concatenate.

One accumulator per alpha holds sums over samples for every class, so memory does not grow with K;
only the targets' own log-probabilities are kept for all samples (K · L · N floats), because the
bounds need their extremes and moments to full precision.
"""

from typing import Protocol

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.family.exponential import exp_times
from afterdrop.family.power_mean import LOWEST, PowerSums, log_power_mean
from afterdrop.family.temperature import COARSE, Nodes
from afterdrop.kernels import partitions
from afterdrop.transfer import constant

Results = dict[str, Tensor]

COLUMN = ("target", "peak", "class", "partition", "one", "two", "entropy")
MOMENTS = ("bound", "lowest", "highest", "mean", "square", "second", "spread", "mean_entropy")


class TooLow(Exception):
    """A probability is below what the kernels' plain sums can hold; sums in log space can."""


class Accumulator(Protocol):
    """Takes predictions of samples, block by block, and gives per-target results."""

    def add(self, lp: Tensor, /) -> None:
        """Adds log-probabilities [S, L, N, V], or logits if made for them."""

    def end_block(self) -> None:
        """Closes an independent block of samples."""

    def results(self) -> Results:
        """Per-target results, once every block is closed."""


def log_softmax(logits: Tensor, where: str | None, room: Tensor | None = None) -> Tensor:
    """Log-probabilities in float32 or better; NaN and +inf logits are refused.

    Args:
        logits: [..., V].
        where: What they belong to, for the message; None leaves `require_numbers` to whoever calls,
            because it waits for a device.
        room: A result of the past that may be written over where it is large enough: fresh memory
            costs as much as the logarithms.
    """
    lp = logits.double() if logits.dtype == torch.float64 else logits.float()
    out = None
    if room is not None and room.numel() >= lp.numel() and room.dtype == lp.dtype:
        out = room.view(-1)[: lp.numel()].view(lp.shape)
    lp = torch.log_softmax(lp, -1, out=out)
    if where is not None:
        require_numbers(lp[..., 0], where)
    return lp


def require_numbers(log_probs: Tensor, where: str) -> None:
    """Refuses the log-softmax of NaN or +inf logits.

    Args:
        log_probs: One of each row: one such logit makes the whole row NaN.
        where: What they belong to, for the message.
    """
    if log_probs.isnan().any():
        raise DataError(
            f"the model gave NaN or infinite logits for {where}; look for overflow, inputs "
            "that are not normalised, or a row in which every class is masked"
        )


def at_targets(lp: Tensor, targets: Tensor) -> Tensor:
    """The entries of the targets along the last dimension."""
    index = targets.expand(lp.shape[:-1]).unsqueeze(-1)
    return lp.gather(-1, index).squeeze(-1)


def distribution(log_means: Tensor, targets: Tensor, nodes: Nodes) -> Results:
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
        "entropy": _entropy(log_means, (G[-2] + peak).unsqueeze(-1)),
    }


def _entropy(log_means: Tensor, log_z: Tensor) -> Tensor:
    log_p = (log_means - log_z).clamp_min_(LOWEST)
    return -torch.linalg.vecdot(exp_times(log_p, 1.0), log_p).double()


def coarse_xe(part: Results, nodes: Nodes) -> Tensor:
    """XE [..., Jc, N] at the coarse nodes, from what `distribution` keeps."""
    G = part["partition"][..., ::COARSE, :].double()
    inverse = constant(nodes.inverse(COARSE), G.device, torch.float64).view(-1, 1)
    return G + inverse * (part["peak"] - part["target"]).unsqueeze(-2)


def cross_entropies(log_means: Tensor, targets: Tensor, inverse: Tensor) -> Tensor:
    """XE [..., J, N] of log M [..., N, V] at inverse temperatures."""
    G, peak = partitions(log_means, inverse)
    below = (peak - at_targets(log_means, targets)).double()
    inverse = constant(inverse, below.device, torch.float64).view(-1, *[1] * below.dim())
    return (G.double() + inverse * below).movedim(0, -2)


def target_moments(lp_K: Tensor, alphas: tuple[float, ...]) -> Results:
    """What the bounds need of the samples' own log-probabilities of the targets [K, L, N]."""
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
    """

    def __init__(
        self, alphas: tuple[float, ...], targets: Tensor, nodes: Nodes, blocks: int
    ) -> None:
        self.alphas, self.targets, self.nodes, self.blocks = alphas, targets, nodes, blocks
        # Means and second moments of p itself serve the normaliser's approximation.
        self._powers = tuple(sorted({*alphas, 1.0, 2.0}))
        self._block = PowerSums(self._powers, entropy=True)
        self._stack: list[tuple[int, PowerSums]] = []
        self._halves: list[dict[float, Tensor]] = []
        self._curve: dict[int, list[Tensor]] = {}
        self._at_target: list[Tensor] = []
        self._coarse = torch.cat([nodes.inverse(COARSE), torch.ones(1, dtype=torch.float64)])

    def add(self, lp: Tensor) -> None:
        """Adds log-probabilities [S, L, N, V]."""
        self._block.add(lp)
        self._at_target.append(at_targets(lp, self.targets))

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
        return cross_entropies(sums.log_mean(alpha), self.targets, inverse)

    def results(self) -> Results:
        """Per-target results once every block is closed; see `Scores` for their names."""
        _, sums = self._stack[-1]
        parts: list[Results] = []
        for alpha in self.alphas:
            log_means = sums.log_mean(alpha)
            part = distribution(log_means, self.targets, self.nodes)
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
        lp_K = torch.cat(self._at_target).double()
        first, second = sums.log_mean(1.0), sums.log_mean(2.0)
        ratio = (2 * second - first).masked_fill(first.isneginf(), float("-inf"))
        assert sums.entropy is not None
        return target_moments(lp_K, self.alphas) | {
            "spread": (exp_times(ratio, 1.0).sum(-1) - 1).clamp_min_(0.0).double(),
            "mean_entropy": sums.entropy.double() / len(lp_K),
        }


class SampleTemper:
    """Accumulates samples for members whose temperature acts on each sample before averaging.

    Costs an accumulator per alpha and node of temperature: a grid fixed before the passes. Alpha 0
    is left out, where both tempers are one model.
    """

    def __init__(
        self, alphas: tuple[float, ...], targets: Tensor, nodes: Nodes, blocks: int
    ) -> None:
        self.alphas = tuple(a for a in alphas if a > 0)
        self.targets, self.inverse = targets, nodes.inverse()
        self._half_size = max(1, blocks // 2)
        self._closed = 0
        self._sums = [PowerSums(self.alphas) for _ in self.inverse]
        self._bounds = [torch.zeros(()) for _ in self.inverse]
        self._count = 0
        self._first: list[PowerSums] | None = None
        self._halves: list[Tensor] = []

    def add(self, lp: Tensor) -> None:
        """Adds log-probabilities [S, L, N, V]."""
        for j, b in enumerate(self.inverse.tolist()):
            tempered = (lp * b).log_softmax(-1)
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
        """[L, A, J, N]."""
        rows = [
            torch.stack([-at_targets(self._log_p(s, a)[0], self.targets).double() for s in sums], 1)
            for a in self.alphas
        ]
        return torch.stack(rows, 1)

    def results(self) -> Results:
        """Per-target results, each [L, A, J, N] but for the bound [L, J, N]."""
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
                cells["entropy"].append(_entropy(log_p, torch.zeros_like(peak).unsqueeze(-1)))
            for name, tensors in cells.items():
                columns[name].append(torch.stack(tensors, 1))
        out = {f"sample_{name}": torch.stack(tensors, 1) for name, tensors in columns.items()}
        out["sample_xe"] = xe
        out["sample_bound"] = torch.stack([b / self._count for b in self._bounds], 1)
        if len(self._halves) == 2:
            out["sample_half"] = torch.stack([h - xe for h in self._halves], -3).float()
        return out
