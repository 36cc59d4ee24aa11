"""From parameters of mask samples to per-target results of likelihoods of numbers.

Legend: K samples, S of a chunk, M multipliers, A alphas, J temperatures, N targets, R rows (targets
of all multipliers), V points of a grid, P parameters.

    log M_α(y) = log power mean of p_k(y)            exact at the target
    Z_α(T)     = ∫ M_α(y)^(1/T) dy ≤ 1 at T = 1      quadrature; 1 for α = 1 and closed for α = 0
    NLL        = log Z_α(T) − log M_α(y)/T

The parameters of all samples are kept until the last one, since there are few of them: the grid of
a target then covers every sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods.categorical_sums import target_moments
from afterdrop.evaluation.likelihoods.density_summaries import (
    EXACT,
    Temperatures,
    grid_of,
    single_results,
    stacked,
    summary,
)
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.family.power_mean import PowerSums, log_power_mean
from afterdrop.family.uniform_grid import GridDistribution, UniformGrid

_ROWS = 2**14  # rows times samples at a time
_AT_ONCE = 2**21  # log-densities at a time


@dataclasses.dataclass(frozen=True)
class _Samples:
    """Samples at a temperature, on a grid that covers them.

    Attributes:
        kind: The likelihood.
        parameters: [K, R, P].
        grid: The grid.
        at_y: [K, R] log-densities of the targets.
        power: 1/T, where the likelihood has no parameters for tempered samples.
        lift: [K, R] what normalises those.
    """

    kind: ParametricLikelihood
    parameters: Tensor
    grid: UniformGrid
    at_y: Tensor
    power: float = 1.0
    lift: Tensor | None = None

    @classmethod
    def of(
        cls,
        kind: ParametricLikelihood,
        parameters: Tensor,
        y: Tensor,
        temperature: float,
        ends: tuple[float, float],
    ) -> _Samples:
        """Samples tempered by `temperature`, of which the mean will be tempered between `ends`."""
        closed = parameters if temperature == 1 else kind.tempered(parameters, temperature)
        if closed is not None:
            return cls(kind, closed, grid_of(kind, closed, ends), kind.log_prob(closed, y))
        grid = grid_of(kind, parameters, (min(1.0, temperature), max(1.0, temperature)))
        power = 1 / temperature
        lift = [
            -grid.log_integral(power * kind.log_prob(each.unsqueeze(-2), grid.points))
            for each in parameters
        ]
        at_y = power * kind.log_prob(parameters, y) + torch.stack(lift)
        return cls(kind, parameters, grid, at_y, power, torch.stack(lift))

    def log_density(self, part: slice) -> Tensor:
        """[S, R, V] of some samples."""
        lp = self.kind.log_prob(self.parameters[part].unsqueeze(-2), self.grid.points)
        return lp if self.lift is None else lp * self.power + self.lift[part].unsqueeze(-1)

    def levels(
        self, spans: Sequence[range], powers: tuple[float, ...]
    ) -> Iterator[list[tuple[range, PowerSums]]]:
        """Sums over independent blocks, then over pairs of them, up to all samples."""
        level = []
        step = max(1, _AT_ONCE // max(1, self.grid.points.numel()))
        for span in spans:
            sums = PowerSums(powers)
            for start in range(span.start, span.stop, step):
                sums.add(self.log_density(slice(start, min(start + step, span.stop))))
            level.append((span, sums))
        yield level
        while len(level) > 1:
            merged = []
            for (first, sums), (second, others) in zip(level[::2], level[1::2]):
                sums.merge(others)
                merged.append((range(first.start, second.stop), sums))
            level = merged
            yield level


class Rows:
    """Results of some rows, from the parameters of all samples.

    Args:
        kind: The likelihood.
        parameters: [K, R, P], float64.
        y: [R].
        alphas: The alphas of the grid.
        temperatures: Where results are kept.
        spans: The samples of each independent block.
    """

    def __init__(
        self,
        kind: ParametricLikelihood,
        parameters: Tensor,
        y: Tensor,
        alphas: tuple[float, ...],
        temperatures: Temperatures,
        spans: Sequence[range],
    ) -> None:
        self.kind, self.parameters, self.y = kind, parameters, y
        self.alphas, self.temperatures, self.spans = alphas, temperatures, spans
        self.closed = kind.geometric(parameters[:1]) is not None  # whether alpha 0 has a form

    def results(self) -> Results:
        """Every result of Scores: [A, J, R], or the dimensions of the schema among these."""
        kept, ends = self.temperatures.kept, self.temperatures.ends
        if self.temperatures.samples:
            passes = [self._pass(t, EXACT, [(1.0, s)]) for t, s in self.temperatures.each]
        else:
            passes = [self._pass(1.0, ends, self.temperatures.each)]
        joined = {
            name: torch.cat([part[name] for part in passes if name in part], -2)
            for name in dict.fromkeys(name for part in passes for name in part)
        }
        joined["quadrature"] = joined["quadrature"].amax(-2).float()
        curve, log_z = joined.pop("curve", None), joined["log_z_at"]
        if not self.temperatures.samples:
            joined.pop("log_z_at"), joined.pop("bound_at")
        if self.kind.noise:
            return joined
        index = kept.index(1.0)
        if curve is not None:
            joined["curve"] = curve[..., index, :]
        joined["one"] = log_z[:, index]
        moments = target_moments(
            self.kind.log_prob(self.parameters, self.y).unsqueeze(1), self.alphas
        )
        return joined | {name: t.squeeze(0) for name, t in moments.items()} | self._spread()

    def _pass(
        self, temperature: float, ends: tuple[float, float], applied: list[tuple[float, bool]]
    ) -> Results:
        """Results of samples at a temperature, whose means are tempered as `applied` says."""
        samples = _Samples.of(self.kind, self.parameters, self.y, temperature, ends)
        columns: list[Results] = [{} for _ in self.alphas]
        curves: list[list[Tensor]] = [[] for _ in self.alphas]
        for level in samples.levels(self.spans, self.alphas):
            for a, alpha in enumerate(self.alphas):
                found = [
                    self._member(samples, alpha, *part, applied, whole=len(level) == 1)
                    for part in level
                ]
                nll = torch.stack([part["nll_at"] for part in found])
                curves[a].append(nll.mean(0))
                if len(level) == 2:
                    columns[a]["nll_half"] = nll
                elif len(level) == 1:
                    columns[a] |= found[0]
        for column, curve in zip(columns, curves):
            if "nll_half" in column:
                column["nll_half"] = (column["nll_half"] - column["nll_at"]).float()
            if len(self.spans) > 2:
                column["curve"] = torch.stack(curve)
            column["bound_at"] = samples.at_y.mean(0, keepdim=True)
        return stacked(columns)

    def _member(
        self,
        samples: _Samples,
        alpha: float,
        span: range,
        sums: PowerSums,
        applied: list[tuple[float, bool]],
        *,
        whole: bool,
    ) -> Results:
        """NLL [J, R] of the samples `span`, and of all samples everything else."""
        own = slice(span.start, span.stop)
        at_y = log_power_mean(samples.at_y[own], alpha)
        if alpha == 0 and self.closed:
            mean = self.kind.geometric(samples.parameters[own])
            assert mean is not None
            found = single_results(self.kind, mean, self.y, applied, summaries=whole)
            log_z = at_y + found["nll_at"]  # the same at every temperature only at T = 1
            return found | {"log_z_at": log_z, "quadrature": torch.zeros_like(log_z[:1])}
        grid, log_means = samples.grid, sums.log_mean(alpha)
        nll, log_zs, kept = [], [], []
        for temperature, wanted in applied:
            log_f = log_means / temperature
            exact = alpha == 1 and temperature == 1
            log_z = torch.zeros_like(at_y) if exact else grid.log_integral(log_f)
            log_zs.append(log_z)
            nll.append(log_z - at_y / temperature)
            if whole and wanted:
                kept.append(summary(GridDistribution(grid, log_f), self.y))
        out = {"nll_at": torch.stack(nll), "log_z_at": torch.stack(log_zs)}
        out["quadrature"] = grid.integral_error(log_means).unsqueeze(0)
        return out | (stacked(kept) if kept else {})

    def _spread(self) -> Results:
        """∫ var(p)/mean(p) dy, and the mean entropy of the samples, at T = 1."""
        samples = _Samples.of(self.kind, self.parameters, self.y, 1.0, EXACT)
        *_, level = samples.levels([range(len(self.parameters))], (1.0, 2.0))
        first, second = (level[0][1].log_mean(power) for power in (1.0, 2.0))
        ratio = (2 * second - first).masked_fill(first.isneginf(), float("-inf"))
        grid, entropy = samples.grid, torch.zeros_like(self.y)
        for k in range(len(self.parameters)):
            lp = samples.log_density(slice(k, k + 1))[0]
            entropy -= (lp.exp() * lp.clamp_min(-1e30)).sum(-1) * grid.step
        return {
            "spread": (grid.log_integral(ratio).exp() - 1).clamp_min_(0.0),
            "mean_entropy": entropy / len(self.parameters),
        }


class DensitySums:
    """Keeps the parameters of samples, and computes results when all are there.

    Args:
        kind: The likelihood.
        protocol: The evaluation.
        targets: [N].
        group: "sampled", or "quantile" for the means of the samples' quantiles.
        summaries: Whether to summarise distributions, beside log-likelihoods of the targets.
    """

    def __init__(
        self,
        kind: ParametricLikelihood,
        protocol: Protocol,
        targets: Tensor,
        group: Group,
        *,
        summaries: bool = True,
    ) -> None:
        self.kind, self.protocol, self.targets, self.group = kind, protocol, targets, group
        self._summaries = summaries
        self._kept: list[Tensor] = []

    def add(self, parameters: Tensor) -> None:
        """Adds parameters [S, M, N, P]."""
        self._kept.append(parameters)

    def end_block(self) -> None:
        """Blocks are those of the plan."""

    def results(self) -> Results:
        """Per-target results by field."""
        whole = torch.cat(self._kept).double()
        multipliers, count = whole.shape[1:3]
        rows = whole.flatten(1, 2)
        y = self.targets.double().repeat(multipliers)
        step = max(1, _ROWS // len(whole))
        parts = [self._rows(part, of) for part, of in zip(rows.split(step, 1), y.split(step))] or [
            self._rows(rows, y)
        ]
        out = {}
        for name in parts[0]:
            joined = torch.cat([part[name] for part in parts], -1)
            joined = joined.unflatten(-1, (multipliers, count)).movedim(-2, 0)
            if name == "bound_at":  # the same for every alpha
                joined = joined[:, 0]
            out[name] = joined
        if "curve" in out:  # [M, A, sizes, N]
            out["curve"] = out["curve"].movedim(2, 0)
        return out

    def _rows(self, parameters: Tensor, y: Tensor) -> Results:
        temperatures = dataclasses.replace(
            Temperatures.of(self.protocol), summaries=self._summaries
        )
        if self.group == "quantile":
            mean = self.kind.quantile_mean(parameters)
            assert mean is not None
            return single_results(self.kind, mean, y, temperatures.each)
        grid, plan = self.protocol.grid, self.protocol.plan
        return Rows(self.kind, parameters, y, grid.alphas, temperatures, plan.spans).results()
