"""Scores: the results of an evaluation per target, and everything that follows from them.

Legend: L multipliers above 0, A alphas, J nodes, N targets. Tensors by name, N last:
    targets, examples [N]; det_* of the deterministic member: target, peak, class, one, two,
    entropy [N], partition [J, N]; mc_* likewise with [L, A] in front, half [L, A, 2, Jc + 1, N];
    mc_bound, mc_lowest, mc_highest, mc_mean, mc_square, mc_spread, mc_mean_entropy [L, N],
    mc_second [L, A, N]; mc_curve [blocks, L, A, N]; mc_sample_* with temper="sample" [L, A, J, N].
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import ScoresError
from afterdrop.evaluation.accumulators import COLUMN
from afterdrop.evaluation.error_clusters import clusters
from afterdrop.evaluation.protocol import Protocol
from afterdrop.evaluation.scores.curves import Column, MeanColumn, SampleColumn
from afterdrop.evaluation.scores.member_bounds import member_bounds
from afterdrop.evaluation.scores.scores_file import read_scores, write_scores
from afterdrop.family.bounds import Bounds
from afterdrop.family.calibration import Binning, calibration_error
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import Member


@dataclasses.dataclass(frozen=True)
class Fit:
    """A member at its optimal temperature; `at_edge` if the optimum lies beyond the bracket."""

    member: Member
    at_edge: bool


class Scores:
    """Per-target results of every member of a grid on one data set.

    Every later number is a pure function of them: no model and no data are needed again.

    Args:
        protocol: How they were made.
        tensors: The results, by name.

    Example:
        >>> import afterdrop as ad
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
        >>> scores = ad.evaluate(net, data, grid=ad.Grid((0, 1), (0, 1)), num_samples=8)
        >>> best = scores.fit(ad.AMC).member
        >>> bool(scores.xe(best).value <= scores.xe(ad.AMC).value + 1e-6)
        True
    """

    def __init__(self, protocol: Protocol, tensors: Mapping[str, Tensor]) -> None:
        self.protocol = protocol
        self.tensors = dict(tensors)
        self._columns: dict[Member, Column] = {}
        self._fits: dict[tuple[Member, float], Fit] = {}
        self._xe: dict[Member, Estimate] = {}

    # What the scores are about

    @property
    def split(self) -> str:
        """The name of the data."""
        return self.protocol.split

    @property
    def num_targets(self) -> int:
        """N."""
        return len(self.tensors["targets"])

    @property
    def num_samples(self) -> int:
        """K."""
        return self.protocol.plan.num_samples

    @property
    def members(self) -> list[Member]:
        """The members of the grid, at temperature 1, deterministic first."""
        return list(self.protocol.grid)

    @property
    def num_examples(self) -> int:
        """How many examples the targets belong to; of a text, windows."""
        return len(self.tensors["examples"].unique())

    @cached_property
    def clusters(self) -> Tensor:
        """[N] the number of each target's example, 0, 1, ..., or of its passage of a text."""
        return clusters(self.tensors["examples"], dict(self.protocol.stream))

    def __repr__(self) -> str:
        return (
            f"Scores(split={self.split!r}, {len(self.members)} members, K={self.num_samples}, "
            f"{self.num_targets} targets in {self.num_examples} examples)"
        )

    # Cross entropy and temperature

    def values(self, member: Member) -> Values:
        """Per-target cross entropies, with those of the halves."""
        return self._column(member).xe(member.temperature)

    def xe(self, member: Member) -> Estimate:
        """Mean cross entropy (nats) with its errors."""
        if member not in self._xe:
            self._xe[member] = self._estimate(self.values(member))
        return self._xe[member]

    def integrated(self, member: Member) -> Values:
        """Per-target cross entropies of alpha 0 with output dropout integrated out.

        A second estimate of the geometric members of language models, with less variance: mean
        features instead of mean logits. Bounds use the one on the same masks (`values`).
        """
        if member.alpha != 0 or "mc_integrated_target" not in self.tensors:
            raise ScoresError(
                f"{member!r} has no integrated estimate: it exists for alpha 0 of language models "
                "whose softmax is linear in the features"
            )
        if member.deterministic:
            return self.values(member)
        row = self.protocol.grid.stochastic.index(member.multiplier)
        return self._read("mc_integrated_", row, self.num_samples).xe(member.temperature)

    def perplexity(self, member: Member) -> float:
        """The perplexity, exp(XE), at K samples."""
        return math.exp(self.xe(member).value)

    def difference(self, member: Member, other: Member, k: float | None = None) -> Estimate:
        """Paired difference of cross entropies, `member` minus `other`, with its errors.

        Args:
            member: Negative differences are in its favour.
            other: The member to compare with.
            k: Number of samples of the predictors; None for K, math.inf for the limit.
        """
        return self._estimate(self.values(member).minus(self.values(other), k))

    def fit(self, member: Member, num_samples: float | None = None) -> Fit:
        """The member at the temperature that minimises its cross entropy at so many samples.

        Args:
            member: At any temperature.
            num_samples: Of the predictor; by default K. Fewer samples want a higher temperature.
        """
        base, k = member.at_temperature(1.0), num_samples or self.num_samples
        if (base, k) not in self._fits:
            everyone = torch.ones(1, int(self.clusters.max()) + 1, dtype=torch.float64)
            temperature, _, edge = self.fit_weighted(member, everyone, k)
            self._fits[base, k] = Fit(base.at_temperature(temperature.item()), bool(edge.item()))
        return self._fits[base, k]

    def fit_weighted(
        self, member: Member, weights: Tensor, num_samples: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fits for rows of weights [R, examples] (bootstrap, folds): temperature, XE, at edge."""
        k = num_samples or self.num_samples
        return self._column(member, fit=True).fit(self.clusters, weights, k)

    def curve(self, member: Member) -> list[tuple[int, Estimate]]:
        """XE at T = 1 over the number of samples, from merged independent blocks.

        Two points (K/2 and K) by default; `evaluate(blocks=16)` gives five.
        """
        plan = self.protocol.plan
        at, others = member.at_temperature(1.0), []
        if member.deterministic:
            return [(0, self.xe(at))]
        values = self.values(at)
        if "mc_curve" in self.tensors:
            rows = self.tensors["mc_curve"][:, *self.index(at)].double()
            others = [(plan.num_samples // plan.blocks << i, x) for i, x in enumerate(rows[:-1])]
        elif values.halves is not None:
            others = [(plan.num_samples // 2, values.halves.mean(0))]
        points = [(k, self._estimate(Values(x, None, k))) for k, x in others]
        return [*points, (plan.num_samples, self._estimate(values))]

    # Calibration and other metrics; mc_error is NaN where the halves do not keep them

    def accuracy(self, member: Member) -> Estimate:
        """Share of targets that are the most probable class."""
        return self._metric(member, self.correct(member).double())

    def correct(self, member: Member) -> Tensor:
        """[N] whether each target is the most probable class."""
        predicted = self._column(member).predicted(member.temperature)
        return predicted == self.tensors["targets"]

    def confidence(self, member: Member) -> Tensor:
        """[N] probability of the most probable class."""
        return self._column(member).log_confidence(member.temperature).exp()

    def brier(self, member: Member) -> Estimate:
        """Brier score: mean of Σ_c (p(c) − [c = y])²."""
        p = (-self.values(member).whole).exp()
        square = self._column(member).log_square(member.temperature).exp()
        return self._metric(member, 1 - 2 * p + square)

    def ece(self, member: Member, num_bins: int = 15, binning: Binning = "width") -> float:
        """Expected calibration error with equal-width or equal-mass bins."""
        return calibration_error(self.confidence(member), self.correct(member), num_bins, binning)

    def entropy(self, member: Member) -> Estimate:
        """Entropy of the predictive distribution (nats)."""
        return self._metric(member, self._column(member).entropy(member.temperature))

    def mutual_information(self, member: Member) -> Estimate:
        """Entropy of the mean minus mean entropy of the samples; for alpha = 1 at T = 1 only."""
        if member.deterministic or member.alpha != 1 or member.temperature != 1:
            raise ScoresError(
                f"mutual information exists for alpha=1 at temperature 1 only, not for {member!r}: "
                "other members are no mixtures of their samples"
            )
        row, _ = self.index(member)
        mean = self._column(member).entropy(1.0)
        return self._metric(member, mean - self.tensors["mc_mean_entropy"][row])

    def by_frequency(
        self,
        member: Member,
        counts: Tensor,
        bands: Sequence[tuple[float, float]],
        against: Member | None = None,
    ) -> list[tuple[tuple[float, float], int, Estimate | None]]:
        """XE by how often the target's class occurred in training.

        Args:
            member: The member.
            counts: [V] training counts of the classes.
            bands: Pairs (low, high): classes with low < count <= high. They may overlap.
            against: Another member, for paired differences `member` minus `against` instead.

        Returns:
            Band, number of targets and estimate (None for an empty band).
        """
        if counts.shape != (self.protocol.num_classes,):
            raise ScoresError(
                f"counts of shape {tuple(counts.shape)} must have one entry for each of the "
                f"{self.protocol.num_classes} classes"
            )
        values, at = self.values(member), counts[self.tensors["targets"]]
        values = values if against is None else values.minus(self.values(against))
        rows: list[tuple[tuple[float, float], int, Estimate | None]] = []
        for low, high in bands:
            chosen = (at > low) & (at <= high)
            halves = None if values.halves is None else values.halves[:, chosen]
            part = Values(values.whole[chosen], halves, values.num_samples)
            clusters = self.clusters[chosen].unique(return_inverse=True)[1]
            count = int(chosen.sum())
            shared = self.protocol.shared
            rows.append(
                ((low, high), count, estimate(part, clusters, shared=shared) if count else None)
            )
        return rows

    def bounds(self, member: Member) -> Bounds:
        """The dropout objective, the member's objective, and the two gaps between them.

        Raises:
            ScoresError: If there is no decomposition: at T ≠ 1 with the temperature on the mean
                and alpha > 0, or where the tempered samples were not evaluated.
        """
        return member_bounds(self, member)

    # Files and merging

    def save(self, path: str | Path) -> None:
        """Writes the scores as safetensors, atomically."""
        write_scores(path, self.protocol, self.tensors)

    @classmethod
    def load(cls, path: str | Path) -> "Scores":
        """Reads what `save` wrote.

        Raises:
            FileError: If the file is missing, truncated, foreign or of another version.
        """
        return cls(*read_scores(path))

    @classmethod
    def merge(cls, parts: Sequence["Scores"]) -> "Scores":
        """The scores of disjoint data evaluated in parts, as if evaluated at once.

        Parts must share the protocol and number their examples differently
        (`evaluate(first_example=...)`).
        """
        if not parts:
            raise ScoresError("merge needs at least one Scores")
        for part in parts[1:]:
            parts[0].protocol.require_same(part.protocol, "the Scores to merge")
        ordered = sorted(parts, key=lambda part: int(part.tensors["examples"].min()))
        for before, after in itertools.pairwise(ordered):
            if before.tensors["examples"].max() >= after.tensors["examples"].min():
                raise ScoresError(
                    "the Scores to merge number the same examples; evaluate the later part with "
                    f"first_example={int(before.tensors['examples'].max()) + 1}"
                )
        names = ordered[0].tensors
        tensors = {n: torch.cat([p.tensors[n] for p in ordered], -1) for n in names}
        return cls(parts[0].protocol, tensors)

    # Inside

    def _estimate(self, values: Values) -> Estimate:
        return estimate(values, self.clusters, shared=self.protocol.shared)

    def _metric(self, member: Member, values: Tensor) -> Estimate:
        samples = 0 if member.deterministic else self.num_samples
        return self._estimate(Values(values, None, samples))

    def index(self, member: Member) -> tuple[int, int]:
        """Row (multiplier) and column (alpha) of a member in the tensors."""
        grid = self.protocol.grid
        try:
            return grid.stochastic.index(member.multiplier), grid.alphas.index(member.alpha)
        except ValueError:
            raise ScoresError(
                f"{member!r} was not evaluated: alphas {grid.alphas}, multipliers "
                f"{grid.multipliers}; evaluate with a grid that contains it"
            ) from None

    def _column(self, member: Member, *, fit: bool = False) -> Column:
        """The member's column; at T = 1 both tempers are the same and the exact one is used."""
        tempered = member.temper == "sample" and (fit or member.temperature != 1)
        key = dataclasses.replace(member, temperature=2.0 if tempered else 1.0)
        if key not in self._columns:
            made = self._sample_column(member) if tempered else self._mean_column(member)
            self._columns[key] = made
        return self._columns[key]

    def _mean_column(self, member: Member) -> MeanColumn:
        if member.deterministic:
            return self._read("det_", ..., 0)
        return self._read("mc_", self.index(member), self.num_samples)

    def _read(self, prefix: str, at: Any, samples: int) -> MeanColumn:
        target, peak, top, partition, one, two, entropy = (
            self.tensors[prefix + name][at] for name in COLUMN
        )
        half = self.tensors[prefix + "half"][at] if prefix + "half" in self.tensors else None
        nodes = self.protocol.nodes
        return MeanColumn(target, peak, top, partition, one, two, entropy, half, nodes, samples)

    def _sample_column(self, member: Member) -> SampleColumn:
        if "mc_sample_xe" not in self.tensors:
            raise ScoresError(
                f"{member!r} needs tempered samples; evaluate with Grid(..., temper='sample')"
            )
        row, _ = self.index(member)
        at = row, [a for a in self.protocol.grid.alphas if a > 0].index(member.alpha)
        names = ("xe", "peak", "class", "square", "entropy")
        xe, peak, top, square, entropy = (self.tensors[f"mc_sample_{n}"][at] for n in names)
        half = self.tensors["mc_sample_half"][at] if "mc_sample_half" in self.tensors else None
        nodes = self.protocol.sample_nodes
        return SampleColumn(xe, peak, top, square, entropy, half, nodes, self.num_samples)
