"""One member's per-target results as functions of the temperature.

Legend: N targets, J nodes, Jc coarse nodes, R resamples, G examples; b = 1/T.
Two curves with one interface: `MeanCurve` (the temperature acts on the averaged distribution)
and `SampleCurve` (on each sample before averaging).
"""

import dataclasses
import functools
import math

import torch
from torch import Tensor

from afterdrop.errors import ScoresError
from afterdrop.family.estimates import Values, cluster_sums
from afterdrop.family.partition_interpolation import between_nodes, interpolated, is_smooth
from afterdrop.family.temperature import COARSE, SPAN, Nodes, fit_interpolated, fit_temperature

_ELEMENTS = 1 << 19  # values converted to float64 at once: all would take more memory than Scores
FINER = 161  # nodes for means of G where the nodes of each target's G are too few


def within(temperature: float, nodes: Nodes) -> Tensor:
    """The inverse of a temperature, which must lie within the bracket of the nodes."""
    low, high = nodes.low, nodes.high
    if not low * (1 - 1e-9) <= temperature <= high * (1 + 1e-9):
        remedy = "temperatures=(low, high) that contain it"
        if nodes.reach == 1:  # tempered samples, kept around the middle of the bracket
            remedy = f"temperatures=({temperature / SPAN:g}, {temperature * SPAN:g})"
        raise ScoresError(
            f"temperature={temperature:g} lies outside the bracket {low:g} to {high:g} of these "
            f"Scores; evaluate again with {remedy}"
        )
    return torch.tensor(1.0 / temperature, dtype=torch.float64)


def cross_entropies(whole: Tensor, delta: Tensor | None, num_samples: int) -> Values:
    """XE of targets [N], and of the halves from their differences to it [2, N].

    A distribution without any probability (a geometric mean of samples that have no class in
    common) leaves XE undefined; it counts as infinite, as that of an impossible target.
    """
    halves = None if delta is None else _or_infinite(whole + delta)
    return Values(_or_infinite(whole), halves, num_samples, floor=0.0)


def _or_infinite(values: Tensor) -> Tensor:
    return values.masked_fill(values.isnan(), math.inf)


@dataclasses.dataclass(frozen=True)
class Over:
    """Means over the targets that are possible at all, for rows of weights over examples.

    Attributes:
        possible: [N] which targets are.
        clusters: [N] their examples.
        weights: [R, G].
    """

    possible: Tensor
    clusters: Tensor
    weights: Tensor

    def _sum(self, values: Tensor) -> Tensor:
        return self.weights @ cluster_sums(values.double(), self.clusters).t()

    def mean(self, values: Tensor) -> Tensor:
        """Of values [J, N] or [N]: [R, J] or [R]."""
        total = self._sum(self.possible).clamp_min(1.0)
        if values.dim() == 1:
            return self._sum(values.where(self.possible, 0.0)) / total
        room = max(_ELEMENTS, self.weights.numel())  # weights of resamples take as much anyway
        nodes = max(1, room // max(1, values.shape[1]))
        parts = [self._sum(part.where(self.possible, 0.0)) for part in values.split(nodes)]
        return torch.cat(parts, -1) / total.unsqueeze(-1)

    def cost(self, half: Tensor, ratio: float) -> Tensor:
        """By what XE is higher with 1/ratio of the samples, from that of halves [2, J, N]."""
        more = self.mean(half.double().mean(0).nan_to_num(0.0, 0.0, 0.0))
        return (ratio - 1) * (more.clamp_min(0.0) if ratio > 1 else more)  # fewer are never better

    @property
    def impossible(self) -> Tensor:
        """[R] whether a target with a weight is."""
        return self._sum(~self.possible) > 0


@dataclasses.dataclass(frozen=True)
class MeanCurve:
    """log M of a member: at the target, its peak, and its partition G at nodes.

    Attributes:
        target: [N] log M(y).
        peak: [N] largest log M.
        top: [N] its class.
        partition: [J, N] G(b) = log Σ_c exp(b (log M(c) − peak)).
        one: [N] L(1).
        two: [N] L(2).
        entropy_one: [N] entropy at T = 1.
        half: [2, Jc + 1, N] XE of each half minus XE, at the coarse nodes and at T = 1; or None.
        nodes: The nodes.
        num_samples: K, or 0.
    """

    target: Tensor
    peak: Tensor
    top: Tensor
    partition: Tensor
    one: Tensor
    two: Tensor
    entropy_one: Tensor
    half: Tensor | None
    nodes: Nodes
    num_samples: int

    def xe(self, temperature: float) -> Values:
        """Cross entropies of the targets."""
        if temperature == 1:
            whole = self.one - self.target
            delta = None if self.half is None else self.half[:, -1]
        else:
            b = within(temperature, self.nodes)
            whole = self._partition(b)[0] + b * (self.peak - self.target)
            weights = self.nodes.weights(b, COARSE)
            delta = None if self.half is None else interpolated(weights, self.half[:, :-1])
        return cross_entropies(whole, delta, self.num_samples)

    @functools.cached_property
    def _smooth(self) -> bool:
        return is_smooth(self.partition, self.nodes)

    def _partition(self, *inverse: Tensor) -> list[Tensor]:
        """G [N] at inverse temperatures."""
        if self._smooth:
            return [interpolated(self.nodes.weights(b), self.partition) for b in inverse]
        return list(between_nodes(self.partition, self.nodes, torch.stack(inverse)))

    def log_confidence(self, temperature: float) -> Tensor:
        """Log-probability of the predicted class."""
        if temperature == 1:
            return self.peak - self.one
        return -self._partition(within(temperature, self.nodes))[0]

    def log_square(self, temperature: float) -> Tensor:
        """Log of Σ_c p(c)², for the Brier score."""
        if temperature == 1:
            return self.two - 2 * self.one
        b = within(temperature, self.nodes)
        twice, once = self._partition(2 * b, b)
        return twice - 2 * once

    def entropy(self, temperature: float) -> Tensor:
        """Entropy of the distribution: G − dG/ds with s = log b."""
        if temperature == 1:
            return self.entropy_one
        b = within(temperature, self.nodes)
        step = 1e-3
        at, ahead, behind = self._partition(b, b * math.exp(step), b * math.exp(-step))
        return at - (ahead - behind) / (2 * step)

    def predicted(self, temperature: float) -> Tensor:
        """The predicted class, the same at every temperature; −1 where none is possible."""
        return self.top.masked_fill(self.peak.isneginf(), -1)

    def fit(self, clusters: Tensor, weights: Tensor, k: float) -> tuple[Tensor, Tensor, Tensor]:
        """For each row of weights [R, G] over examples: best temperature, XE there, if at edge.

        At `k` samples. Impossible targets do not count for the temperature, but make XE infinite.
        """
        over = Over((self.target - self.peak).isfinite(), clusters, weights)
        values, nodes = self._mean_partition(over)
        targets = over.mean(self.target - self.peak)
        if self.half is None or k == self.num_samples:
            temperature, edge = fit_temperature(values, targets, nodes)
        else:  # XE need not be convex
            inverse = nodes.inverse()
            more = over.cost(self.half[:, :-1], self.num_samples / k)
            values = values + more @ self.nodes.weights(inverse, COARSE).t()
            temperature, edge = fit_interpolated(values - inverse * targets.unsqueeze(-1), nodes)
        b = 1 / temperature
        found = (nodes.weights(b) * values).sum(-1) - b * targets
        return temperature, found.masked_fill(over.impossible, math.inf), edge

    def _mean_partition(self, over: Over) -> tuple[Tensor, Nodes]:
        """Means [R, J] of G over targets at nodes between which they can be interpolated.

        Where the nodes are too far apart even for means, these are finer ones.
        """
        values = over.mean(self.partition)
        if is_smooth(values.t(), self.nodes):
            return values, self.nodes
        finer = dataclasses.replace(self.nodes, count=FINER)
        few = finer.inverse().split(FINER // 8)  # a part at a time: N targets each
        parts = [over.mean(between_nodes(self.partition, self.nodes, b)) for b in few]
        return torch.cat(parts, -1), finer


@dataclasses.dataclass(frozen=True)
class SampleCurve:
    """A member at nodes of the temperature that acts on each sample; interpolated in between.

    Attributes:
        at_nodes: [J, N] cross entropies.
        log_peak: [J, N] log-probability of the predicted class.
        tops: [J, N] predicted classes.
        squares: [J, N] log Σ_c p(c)².
        entropies: [J, N].
        half: [2, J, N] XE of each half minus XE, or None.
        nodes: The nodes.
        num_samples: K.
    """

    at_nodes: Tensor
    log_peak: Tensor
    tops: Tensor
    squares: Tensor
    entropies: Tensor
    half: Tensor | None
    nodes: Nodes
    num_samples: int

    def _weights(self, temperature: float) -> Tensor:
        return self.nodes.weights(within(temperature, self.nodes))

    def xe(self, temperature: float) -> Values:
        """Cross entropies of the targets."""
        weights = self._weights(temperature)
        delta = None if self.half is None else interpolated(weights, self.half)
        return cross_entropies(weights @ self.at_nodes, delta, self.num_samples)

    def log_confidence(self, temperature: float) -> Tensor:
        """Log-probability of the predicted class."""
        return self._weights(temperature) @ self.log_peak

    def log_square(self, temperature: float) -> Tensor:
        """Log of Σ_c p(c)²."""
        return self._weights(temperature) @ self.squares

    def entropy(self, temperature: float) -> Tensor:
        """Entropy of the distribution."""
        return self._weights(temperature) @ self.entropies

    def predicted(self, temperature: float) -> Tensor:
        """The predicted class at the nearest node."""
        gap = self.nodes.inverse().log() + torch.tensor(temperature, dtype=torch.float64).log()
        return self.tops[int(gap.abs().argmin())]

    def fit(self, clusters: Tensor, weights: Tensor, k: float) -> tuple[Tensor, Tensor, Tensor]:
        """As for `MeanCurve`."""
        over = Over(self.at_nodes.isfinite().all(0), clusters, weights)
        means = over.mean(self.at_nodes)
        if self.half is not None and k != self.num_samples:
            means = means + over.cost(self.half, self.num_samples / k)
        temperature, edge = fit_interpolated(means, self.nodes)
        found = (self.nodes.weights(1 / temperature) * means).sum(-1)
        return temperature, found.masked_fill(over.impossible, math.inf), edge


Curve = MeanCurve | SampleCurve
