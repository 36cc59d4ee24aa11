"""The kernels' form of `categorical_sums.MeanTemper`: sums stay on the GPU, from logits to results.

Legend: M multipliers, A alphas, J nodes of temperature, K samples, S samples of a chunk, N targets,
V classes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from afterdrop import kernels
from afterdrop.evaluation.request import Protocol, Request
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.family.member import Grid
from afterdrop.family.partition_ladder import HALVES_EVERY, PartitionLadder
from afterdrop.family.temperature import COARSE, Nodes
from afterdrop.kernels.family_sums import ALPHAS, LOWEST_MEAN_LOG_P, OF_SAMPLES, FamilySums
from afterdrop.models.kernel_support import Table, why_unsupported


def supports(request: Request, model: nn.Module, device: torch.device) -> str | None:
    """Why the kernels cannot sum the samples of a request; None if they can."""
    return kernels.why_not(device) or why_unsupported(request, SUPPORTED)


def why_not_alphas(grid: Grid) -> str | None:
    """Why there are no sums for the alphas of a grid; None if there are."""
    if set(grid.alphas) <= set(ALPHAS):
        return None
    return f"alphas {grid.alphas} are not all among {ALPHAS}"


def why_not_temperatures(request: Request) -> str | None:
    """Why the sums cannot reach some temperatures; None if they can, as any by default."""
    if request.temperatures is None or PartitionLadder.reaches(Nodes(*request.temperatures)):
        return None
    return f"temperatures={request.temperatures} are too far apart"


# The values of every field of a `Request` that the sums support.
SUPPORTED: Table = {
    "grid": {"alphas": why_not_alphas, "multipliers": "any", "temper": ("mean",)},
    "plan": {"num_samples": "any", "seed": "any", "scheme": "any", "blocks": (2,)},
    "split": "any",
    "rates": "any",
    "noise": "any",
    "batch_dim": "any",
    "class_dim": "any",
    "ignore_index": "any",
    "temperatures": why_not_temperatures,
    "stream": "any",
    "limit": "any",
    "adaptive": "any",
    "logits": "any",
    "targets": "any",  # batches have been read before
    "targets_per_example": "any",  # the others do not count
    "likelihood": ("categorical", "binary", "multilabel"),
    "noise_variance": "any",
    "dynamic": (None,),  # such an evaluation has no samples to sum
}


def family_sums(
    protocol: Protocol, targets: int, device: torch.device, together: int | None = None
) -> FamilySums:
    """The sums of an evaluation's samples, for a number of targets at a time (see `FamilySums`)."""
    return FamilySums(
        protocol.grid.alphas,
        PartitionLadder(protocol.nodes),
        protocol.num_classes,
        targets,
        protocol.plan.num_samples,
        device,
        together,
    )


class KernelSums:
    """Accumulates logits of samples; see `likelihoods.Accumulator`.

    Args:
        protocol: The evaluation.
        targets: [N].
        groups: M, the multipliers that run together.
    """

    group: Group = "sampled"

    def __init__(self, protocol: Protocol, targets: Tensor, groups: int) -> None:
        self.protocol, self.targets, self.groups = protocol, targets, groups
        count = groups * len(targets)
        self._sums: FamilySums | None = family_sums(protocol, count, targets.device)
        self._found = self._sums.results(count)
        self._lowest: Tensor | None = None
        self._seen = 0

    def add(self, predictions: Tensor) -> None:
        """Adds logits [S, M, N, V]."""
        assert self._sums is not None
        logits = predictions
        if not logits.is_floating_point() or logits.dtype == torch.float64:
            logits = logits.float()
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        samples = range(self._seen, self._seen + len(logits))
        self._sums.add(logits, self.targets, self._found, samples)
        self._seen = samples.stop

    def end_block(self) -> None:
        """Closes an independent block; here blocks are the halves, which the sums know."""

    def results(self) -> Results:
        """Per-target results [M, ...], as those of `MeanTemper`."""
        assert self._sums is not None
        self._sums.finish(self.groups * len(self.targets), self._found)
        found, self._lowest = self._found, self._found["lowest"].amin(0)
        self._sums, self._found = None, {}  # large, and not needed any more
        return family_results(found, self.groups, self.protocol)

    def why_not_held(self) -> str | None:
        """Why sums could not hold the samples, once the results were computed; None if they did."""
        assert self._lowest is not None
        return why_not_held(self._lowest)


def why_not_held(lowest: Tensor) -> str | None:
    """Why plain sums could not hold some log-probabilities; None if they could.

    NaN is not held either: the plain form reports it.

    Args:
        lowest: The smallest mean log-probabilities over the samples of a half.
    """
    if lowest.numel() and not float(lowest.min()) >= LOWEST_MEAN_LOG_P:
        return f"log-probabilities are below {LOWEST_MEAN_LOG_P:g}"
    return None


def family_results(
    sums: Results, groups: int, protocol: Protocol, kept: Tensor | None = None
) -> Results:
    """What `MeanTemper.results` gives, from the kernels' sums.

    Args:
        sums: `FamilySums.results` of the targets of all groups, one group after the other.
        groups: M.
        protocol: The evaluation.
        kept: Which targets of each group to give; None for all.
    """
    alphas, found = protocol.grid.alphas, _by_group(sums, groups)
    shape = groups, len(sums["chosen"]) // groups
    lp_K, entropies = (sums[name].unflatten(0, shape) for name in ("chosen", "entropies"))
    if kept is not None:
        found = {name: tensor.index_select(-1, kept) for name, tensor in found.items()}
        lp_K, entropies = lp_K.index_select(1, kept), entropies.index_select(1, kept)
    lp_K = lp_K.double()
    whole, halves = _target_means(lp_K, alphas)
    target = torch.stack([whole[alpha] for alpha in alphas], 1)
    of_halves = torch.stack([halves[alpha].movedim(-1, 1) for alpha in alphas], 1)
    return {
        "bound": lp_K.mean(-1),
        "lowest": lp_K.amin(-1),
        "highest": lp_K.amax(-1),
        "mean": whole[1.0],
        "square": whole[2.0],
        "second": torch.stack([whole[2 * alpha] for alpha in alphas], 1),
        "spread": found["spread"].double().clamp_min(0.0),
        "mean_entropy": entropies.double().mean(-1),
    } | _columns(found, target, of_halves, protocol.nodes)


def mean_results(sums: Results, groups: int, at_target: Tensor, nodes: Nodes) -> Results:
    """What `categorical_sums.distribution` gives, and the halves, from the kernels' sums.

    Args:
        sums: `FamilySums.mean_results` of the targets of all groups, one group after the other.
        groups: M.
        at_target: [M, N, 2] logits of the targets, of either half; [M, N, 1] if there are none.
        nodes: The nodes.
    """
    target = at_target.double()
    halves = target.movedim(-1, 1).unsqueeze(1) if target.shape[-1] > 1 else None
    out = _columns(_by_group(sums, groups), target.mean(-1).unsqueeze(1), halves, nodes)
    log_z = out["one"]
    out |= {name: out[name] - log_z for name in ("target", "peak", "one")}
    out["two"] = out["two"] - 2 * log_z
    return {name: tensor[:, 0] for name, tensor in out.items()}


def _by_group(sums: Results, groups: int) -> Results:
    """Sums of targets with the groups first."""
    return {
        name: tensor.unflatten(-1, (groups, tensor.shape[-1] // groups)).movedim(-2, 0)
        for name, tensor in sums.items()
        if name not in (*OF_SAMPLES, "lowest")
    }


def _columns(found: Results, target: Tensor, halves: Tensor | None, nodes: Nodes) -> Results:
    """What every alpha has, from log M of the targets [M, A, N] and of any halves [M, A, 2, N]."""
    G, peak = found["G"].double(), found["peak"].double()
    fine, coarse, b = _weights(nodes, G.device)
    out = {
        "target": target,
        "peak": peak[:, 0],
        "class": found["class"],
        "partition": (fine @ G[:, :, :-2]).float(),
        "one": G[:, :, -2] + peak[:, 0],
        "two": G[:, :, -1] + 2 * peak[:, 0],
        "entropy": found["entropy"].double(),
    }
    if halves is None:
        return out
    at = torch.cat([G[:, :, :-2:HALVES_EVERY], G[:, :, -2:-1]], -2)
    gap = found["G_half"].transpose(1, 2).double() - at.unsqueeze(2)
    # What is linear in b comes exactly, at the coarse nodes and 1.
    below = (peak[:, 1:].transpose(1, 2) - halves) - (peak[:, 0] - target).unsqueeze(2)
    gap = torch.cat([coarse @ gap[..., :-1, :], gap[..., -1:, :]], -2) + b * below.unsqueeze(-2)
    return out | {"half": gap.float()}


@functools.lru_cache(maxsize=4)
def _weights(nodes: Nodes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Weights from a ladder's rungs to fine and coarse nodes, and b of coarse nodes, then 1."""
    ladder = PartitionLadder(nodes)
    b = torch.cat([nodes.inverse(COARSE), torch.ones(1, dtype=torch.float64)])
    return ladder.fine.to(device), ladder.coarse.to(device), b.unsqueeze(1).to(device)


def _target_means(
    lp_K: Tensor, alphas: tuple[float, ...]
) -> tuple[dict[float, Tensor], dict[float, Tensor]]:
    """Log power means of the targets' own log-probabilities [M, N, K], at the bounds' powers.

    One peak serves every power and both halves: the best sample of a half is above
    `LOWEST_MEAN_LOG_P`, and so is its power, relative to the peak, for a float64.

    Returns:
        Of all samples [M, N] and of the halves [M, N, 2].
    """
    peak = lp_K.amax(-1, keepdim=True)
    below = (lp_K - peak).unflatten(-1, (2, -1))
    whole, halves = {}, {}
    for power in {0.0, 1.0, 2.0, *alphas, *(2 * alpha for alpha in alphas)}:
        if power == 0:
            means = below.mean(-1)
            whole[power], halves[power] = means.mean(-1) + peak.squeeze(-1), means + peak
        else:
            means = (below * power).exp_().mean(-1)
            whole[power] = means.mean(-1).log_().div_(power) + peak.squeeze(-1)
            halves[power] = means.log_().div_(power) + peak
    return whole, halves
