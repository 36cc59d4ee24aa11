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
from collections.abc import Sequence

import torch
from torch import Tensor

from afterdrop.evaluation.likelihoods.categorical_sums import target_moments
from afterdrop.evaluation.likelihoods.density_summaries import (
    EXACT,
    Temperatures,
    single_results,
    stacked,
    summary,
)
from afterdrop.evaluation.likelihoods.parametric import ParametricLikelihood
from afterdrop.evaluation.likelihoods.sample_grids import (
    is_narrow,
    require_precise,
    stated_error,
)
from afterdrop.evaluation.likelihoods.samples_on_grid import SamplesOnGrid
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores.schema import Group, Results
from afterdrop.family.grid_distribution import GridDistribution
from afterdrop.family.power_mean import PowerSums, log_power_mean

_ROWS = 2**14  # rows times samples at a time
_NARROW_ROWS = 32  # rows at a time that need many points


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
        samples = SamplesOnGrid.of(self.kind, self.parameters, self.y, temperature, ends)
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
        samples: SamplesOnGrid,
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
        if whole:
            plain = sums.log_mean(1.0) if 1.0 in sums.alphas else None
            out["quadrature"] = stated_error(grid, log_means, plain).unsqueeze(0)
            require_precise(self.kind, out["quadrature"])
        return out | (stacked(kept) if kept else {})

    def _spread(self) -> Results:
        """∫ var(p)/mean(p) dy, and the mean entropy of the samples, at T = 1."""
        samples = SamplesOnGrid.of(self.kind, self.parameters, self.y, 1.0, EXACT)
        *_, level = samples.levels([range(len(self.parameters))], (1.0, 2.0))
        first, second = (level[0][1].log_mean(power) for power in (1.0, 2.0))
        ratio = (2 * second - first).masked_fill(first.isneginf(), float("-inf"))
        grid, entropy = samples.grid, torch.zeros_like(self.y)
        for k in range(len(self.parameters)):
            lp = samples.log_density(slice(k, k + 1))[0]
            entropy -= grid.integral(lp.exp() * lp.clamp_min(-1e30))
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
        """Per-target results by field; none of means of quantiles that the likelihood lacks."""
        whole = torch.cat(self._kept).double()
        if self.group == "quantile" and self.kind.quantile_mean(whole) is None:
            return {}
        multipliers, count = whole.shape[1:3]
        rows = whole.flatten(1, 2)
        y = self.targets.double().repeat(multipliers)
        out = {}
        for name, joined in self._in_groups(rows, y).items():
            joined = joined.unflatten(-1, (multipliers, count)).movedim(-2, 0)
            if name == "bound_at":  # the same for every alpha
                joined = joined[:, 0]
            out[name] = joined
        if "curve" in out:  # [M, A, sizes, N]
            out["curve"] = out["curve"].movedim(2, 0)
        return out

    def _in_groups(self, rows: Tensor, y: Tensor) -> Results:
        """Results of rows [K, R, P], a part at a time; those that are narrow by themselves."""
        temperatures = Temperatures.of(self.protocol)
        least = self.kind.tempered(rows, temperatures.ends[0]) if temperatures.samples else None
        if least is None:
            narrow = is_narrow(self.kind, rows, temperatures.ends)
        else:
            narrow = is_narrow(self.kind, least, EXACT)
        groups, order = [], []
        step = max(1, _ROWS // len(rows))
        for some, size in ((~narrow, step), (narrow, min(step, _NARROW_ROWS))):
            where = some.nonzero().squeeze(-1)
            groups += [(rows[:, part], y[part]) for part in where.split(size) if len(part)]
            order.append(where)
        parts = [self._rows(*group) for group in groups] or [self._rows(rows, y)]
        back = torch.cat(order).argsort()
        return {n: torch.cat([part[n] for part in parts], -1)[..., back] for n in parts[0]}

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
