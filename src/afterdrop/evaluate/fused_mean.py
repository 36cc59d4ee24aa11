"""The kernels' form of `accumulate.MeanTemper`: sums stay on the GPU from logits to results.

Legend as in `accumulate`: L multipliers, A alphas, J nodes of temperature, K samples, S samples of
one pass, N targets, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from afterdrop import kernels
from afterdrop.evaluate.accumulate import Results, TooLow, target_moments
from afterdrop.evaluate.protocol import Protocol
from afterdrop.family.power_mean import log_power_mean
from afterdrop.family.temperature import COARSE, Nodes
from afterdrop.kernels.family_sums import ALPHAS, LOWEST, FamilySums


def why_not(protocol: Protocol, device: torch.device) -> str | None:
    """Why the kernels cannot sum an evaluation's samples; None if they can."""
    if reason := kernels.why_not(device):
        return reason
    if protocol.grid.temper != "mean":
        return f"temper is {protocol.grid.temper!r}"
    if not set(protocol.grid.alphas) <= set(ALPHAS):
        return f"alphas {protocol.grid.alphas} are not all among {ALPHAS}"
    return None if protocol.plan.blocks == 2 else f"samples are in {protocol.plan.blocks} blocks"


def coarse_inverse(nodes: Nodes) -> Tensor:
    """Inverse temperatures at which halves are kept: the coarse nodes, then 1."""
    return torch.cat([nodes.inverse(COARSE), torch.ones(1, dtype=torch.float64)])


def family_sums(protocol: Protocol, targets: int, device: torch.device) -> FamilySums:
    """The sums of an evaluation's samples, for so many targets at a time."""
    nodes, one = protocol.nodes, torch.ones(1, dtype=torch.float64)
    return FamilySums(
        protocol.grid.alphas,
        torch.cat([nodes.inverse(), one, 2 * one]),
        coarse_inverse(nodes),
        protocol.num_classes,
        targets,
        protocol.plan.num_samples,
        device,
    )


class FusedMean:
    """Accumulates logits of samples; see `accumulate.Accumulator`.

    Args:
        protocol: The evaluation.
        targets: [N].
        groups: L, the multipliers that run together.
    """

    def __init__(self, protocol: Protocol, targets: Tensor, groups: int) -> None:
        self.protocol, self.targets, self.groups = protocol, targets, groups
        count = groups * len(targets)
        self._sums = family_sums(protocol, count, targets.device)
        self._found = self._sums.results(count)
        self._seen = 0

    def add(self, logits: Tensor) -> None:
        """Adds logits [S, L, N, V]."""
        if not logits.is_floating_point() or logits.dtype == torch.float64:
            logits = logits.float()
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        samples = range(self._seen, self._seen + len(logits))
        self._sums.stream(logits, self.targets, self._found, samples)
        self._seen = samples.stop

    def end_block(self) -> None:
        """Closes an independent block; here blocks are the halves, which the sums know."""

    def results(self) -> Results:
        """Per-target results [L, ...], as those of `MeanTemper`.

        Raises:
            TooLow: If plain sums cannot hold a probability, or logits were NaN.
        """
        K, N = self.protocol.plan.num_samples, len(self.targets)
        self._sums.finish(self.groups * N, self._found)
        found = {
            name: tensor.unflatten(-1, (self.groups, N)).movedim(-2, 0)
            for name, tensor in self._found.items()
            if name not in ("chosen", "lowest")
        }
        found["mean_entropy"] = found["mean_entropy"] / K
        lp_K = self._found["chosen"].view(self.groups, N, K).permute(2, 0, 1)
        require_held(self._found["lowest"])
        return family_results(found, lp_K, self.protocol)


def require_held(lowest: Tensor) -> None:
    """Refuses log-probabilities that plain sums cannot hold, and NaN, which the plain form reports.

    Args:
        lowest: The smallest log-probability of each sample.
    """
    if lowest.numel() and not float(lowest.min()) >= LOWEST:
        raise TooLow


def family_results(found: Results, lp_K: Tensor, protocol: Protocol) -> Results:
    """What `MeanTemper.results` gives, from the kernels' sums.

    Args:
        found: `G` [L, A, J + 2, N], `G_half` [L, 2, A, Jc + 1, N], `peak` [L, 3, A, N], `class` and
            `entropy` [L, A, N], `spread` and `mean_entropy` [L, N].
        lp_K: [K, L, N] log-probabilities of the targets.
        protocol: The evaluation.
    """
    alphas, lp_K = protocol.grid.alphas, lp_K.double()
    out = target_moments(lp_K, alphas)
    peak, G = found["peak"].double(), found["G"]
    out |= {
        "peak": peak[:, 0],
        "class": found["class"],
        "partition": G[:, :, :-2].contiguous(),
        "one": G[:, :, -2].double() + peak[:, 0],
        "two": G[:, :, -1].double() + 2 * peak[:, 0],
        "entropy": found["entropy"].double(),
        "spread": found["spread"].double().clamp_min(0.0),
        "mean_entropy": found["mean_entropy"].double(),
    }
    b = coarse_inverse(protocol.nodes).to(G.device).view(-1, 1)
    at = torch.cat([G[:, :, :-2:COARSE], G[:, :, -2:-1]], -2).double()
    xe = at + b * (peak[:, 0] - out["target"]).unsqueeze(-2)
    halves = []
    for half, lp in enumerate(lp_K.chunk(2)):
        target = torch.stack([log_power_mean(lp, alpha) for alpha in alphas], 1)
        below = (peak[:, 1 + half] - target).unsqueeze(-2)
        halves.append(found["G_half"][:, half].double() + b * below - xe)
    out["half"] = torch.stack(halves, -3).float()
    return out
