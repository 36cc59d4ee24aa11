"""Scores: the results of an evaluation per target, and everything that follows from them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import FileError, ScoresError
from afterdrop.evaluation.error_clusters import clusters
from afterdrop.evaluation.part_files import remove_parts
from afterdrop.evaluation.request import Protocol, Request
from afterdrop.evaluation.scores import density_metrics, metrics, schema
from afterdrop.evaluation.scores.curves import Curve
from afterdrop.evaluation.scores.density_curve import DensityCurve
from afterdrop.evaluation.scores.member_bounds import member_bounds, sample_log_likelihoods
from afterdrop.evaluation.scores.member_curves import (
    check_temper,
    density_curve,
    mean_curve,
    sample_curve,
)
from afterdrop.evaluation.scores.schema import Group
from afterdrop.evaluation.scores.scores_file import read_scores, write_scores
from afterdrop.family.bounds import Bounds
from afterdrop.family.calibration import Binning
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import Member
from afterdrop.family.temperature import Nodes


@dataclasses.dataclass(frozen=True)
class Fit:
    """A member at its optimal temperature; `at_edge` if the optimum lies beyond the bracket."""

    member: Member
    at_edge: bool


class Scores:
    """Per-target results of every member of a grid on one data set.

    Every later number is a pure function of them: neither the model nor the data are needed again.

    Args:
        protocol: How they were made.
        tensors: The results by name (`scores.schema`).
        pilot: Scores of all multipliers on part of the data, if a pilot dropped some of them
            (`evaluate(num_samples="auto")`).
        parts: A folder of finished parts that `save` removes, because it is not needed any more.

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

    pilot: Scores | None = None

    def __init__(
        self,
        protocol: Protocol,
        tensors: Mapping[str, Tensor],
        pilot: Scores | None = None,
        parts: Path | None = None,
    ) -> None:
        self.protocol, self._parts = protocol, parts
        self.tensors = dict(tensors)
        self.pilot = pilot
        self._curves: dict[Member, Curve | DensityCurve] = {}
        self._fits: dict[tuple[Member, float], Fit] = {}
        self._xe: dict[Member, Estimate] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copies: what cannot be computed again, without the memory around views."""
        tensors = {
            name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t
            for name, t in self.tensors.items()
        }
        return {"protocol": self.protocol, "tensors": tensors, "pilot": self.pilot}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # What the scores are about

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self.protocol.request

    @property
    def split(self) -> str:
        """The name of the data."""
        return self.request.split

    @property
    def targets(self) -> Tensor:
        """[N] the targets that count."""
        return self.field("data", "targets")

    @property
    def examples(self) -> Tensor:
        """[N] number of each target's example."""
        return self.field("data", "examples")

    @property
    def kinds(self) -> Tensor:
        """[N] what the frequency of a target is counted by: its class, or its label of several."""
        return self.field("data", "labels" if self.has("data", "labels") else "targets")

    @property
    def num_kinds(self) -> int:
        """Number of classes, or of labels."""
        if self.has("data", "labels"):
            return int(self.kinds.max()) + 1
        return self.protocol.num_classes

    @property
    def num_targets(self) -> int:
        """N."""
        return len(self.targets)

    @property
    def num_samples(self) -> int:
        """K."""
        return self.protocol.plan.num_samples

    @property
    def predictor_samples(self) -> int:
        """Samples of a predictor that a choice is made for, if nothing else is said."""
        adaptive = self.request.adaptive
        return self.num_samples if adaptive is None else adaptive.samples

    @property
    def asked(self) -> Request:
        """What the caller asked for: the request before a pilot decided about grid and samples."""
        adaptive = self.request.adaptive
        if adaptive is None or self.pilot is None:
            return self.request
        plan = dataclasses.replace(self.request.plan, num_samples=adaptive.samples)
        return dataclasses.replace(self.request, grid=self.pilot.protocol.grid, plan=plan)

    @property
    def only_in_pilot(self) -> tuple[float, ...]:
        """The multipliers that only the pilot evaluated."""
        grid = self.protocol.grid
        asked = self.pilot.protocol.grid.stochastic if self.pilot is not None else ()
        return tuple(m for m in asked if m not in grid.multipliers)

    @property
    def members(self) -> list[Member]:
        """The members of the grid, at temperature 1, deterministic first."""
        return list(self.protocol.grid)

    @cached_property
    def noise_variance(self) -> float:
        """Of the squared error: the noise variance that temperature 1 stands for.

        By default the mean squared error of the deterministic model on these data, so that DET at
        T = 1 has the best noise. A member's own is this times its temperature.
        """
        return density_metrics.noise_variance(self)

    @property
    def resolved_request(self) -> Request:
        """What was asked for, with the noise variance that was found, for a predictor."""
        if self.request.likelihood != "squared_error":
            return self.request
        return dataclasses.replace(self.request, noise_variance=self.noise_variance)

    @property
    def num_examples(self) -> int:
        """Number of examples that the targets belong to; of a text, windows."""
        return len(self.examples.unique())

    @cached_property
    def clusters(self) -> Tensor:
        """[N] the number of each target's error cluster: its example, or its block of a text."""
        return clusters(self.examples, self.request.stream)

    def __repr__(self) -> str:
        return (
            f"Scores(split={self.split!r}, {len(self.members)} members, K={self.num_samples}, "
            f"{self.num_targets} targets in {self.num_examples} examples)"
        )

    # Cross entropy and temperature

    def values(self, member: Member) -> Values:
        """Per-target cross entropies, with those of the halves and, at T = 1, of quarters."""
        found = self.curve_of(member).xe(member.temperature)
        quarters = None
        if not member.deterministic and member.temperature == 1 and self._num_sizes > 2:
            quarters = self.field("sampled", "curve")[-3][self.index(member)].double()
        return dataclasses.replace(found, member=member, quarters=quarters)

    def xe(self, member: Member) -> Estimate:
        """Mean cross entropy (nats) with its errors; of numbers, negative log-likelihood."""
        if member not in self._xe:
            self._xe[member] = self._estimate(self.values(member))
        return self._xe[member]

    def integrated(self, member: Member) -> Values:
        """Per-target cross entropies of alpha 0 with output dropout integrated out.

        A second estimate of the geometric members of language models, with less variance: mean
        features instead of mean logits. Bounds use the one on the same masks (`values`).
        """
        if member.alpha != 0 or not self.has("integrated"):
            raise ScoresError(
                f"{member!r} has no integrated estimate: it exists for alpha 0 of language models "
                "whose softmax is linear in the features"
            )
        if member.deterministic:
            return self.values(member)
        row = self.protocol.grid.stochastic.index(member.multiplier)
        return mean_curve(self, "integrated", row, self.num_samples).xe(member.temperature)

    def xe_per_example(self, member: Member) -> Estimate:
        """Mean over examples of the sum of an example's cross entropies: of all its labels."""
        return metrics.xe_per_example(self, member)

    def perplexity(self, member: Member) -> Estimate:
        """The perplexity, exp(XE)."""
        return metrics.perplexity(self, member)

    def difference(self, member: Member, other: Member, k: float | None = None) -> Estimate:
        """Paired difference of cross entropies, `member` minus `other`, with its errors.

        Args:
            member: Negative differences are in its favour.
            other: The member to compare with.
            k: Number of samples of the predictors; None for K, math.inf for the limit.
        """
        return self._estimate(self.values(member).minus(self.values(other), k))

    def fit(self, member: Member, num_samples: float | None = None) -> Fit:
        """The member at the temperature that minimises its cross entropy.

        Args:
            member: At any temperature.
            num_samples: Samples of the predictor; by default K. With fewer samples the best
                temperature is higher.
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
        """Fits for rows of weights [R, clusters] (bootstrap, folds): temperature, XE, at edge."""
        k = num_samples or self.num_samples
        return self.curve_of(member, fit=True).fit(self.clusters, weights, k)

    def curve(self, member: Member) -> list[tuple[float, Estimate]]:
        """XE at T = 1 over the number of samples, from merged independent blocks.

        Two points (K/2 and K) by default; `evaluate(blocks=16)` gives five. Given samples have
        three: one sample alone, all but one group of the jackknife, and all.
        """
        plan = self.protocol.plan
        at = member.at_temperature(1.0)
        others: list[tuple[float, Tensor]] = []
        if member.deterministic:
            return [(0, self.xe(at))]
        values = self.values(at)
        if self.has("sampled", "curve"):
            rows = self.field("sampled", "curve")[:, *self.index(at)].double()
            others = [(plan.num_samples // plan.blocks << i, x) for i, x in enumerate(rows[:-1])]
        elif values.halves is not None and plan.scheme == "given":
            share = 1 / (plan.blocks - 1)
            less = values.whole + share * (values.halves.mean(0) - values.whole)
            others = [(1, -sample_log_likelihoods(self, self.index(at)[0]))]
            if plan.num_samples > 2:
                others.append((plan.num_samples * (1 - 1 / plan.blocks), less))
        elif values.halves is not None:
            others = [(plan.num_samples // 2, values.halves.mean(0))]
        points = [(k, self._estimate(Values(x, None, k))) for k, x in others]
        return [*points, (plan.num_samples, self._estimate(values))]

    # Calibration and other metrics

    @property
    def metrics(self) -> dict[str, Callable[[Member], Estimate]]:
        """The metrics beside XE that suit the likelihood, by their names in tables."""
        if self.protocol.has_classes:
            return {"accuracy": self.accuracy, "Brier": self.brier, "ECE": self.ece}
        return {
            "CRPS": self.crps,
            "RMSE": self.rmse,
            "90 % cover": self.coverage,
            "width": self.width,
            "calibration": self.calibration_error,
        }

    def accuracy(self, member: Member) -> Estimate:
        """Share of targets that are the most probable class."""
        return metrics.accuracy(self, member)

    def correct(self, member: Member) -> Tensor:
        """[N] whether each target is the most probable class."""
        return metrics.correct(self, member)

    def confidence(self, member: Member) -> Tensor:
        """[N] probability of the most probable class."""
        return metrics.confidence(self, member)

    def brier(self, member: Member) -> Estimate:
        """Brier score: mean of Σ_c (p(c) − [c = y])²; of labels of 0 and 1, (p(1) − y)²."""
        return metrics.brier(self, member)

    def ece(self, member: Member, num_bins: int = 15, binning: Binning = "width") -> Estimate:
        """Expected calibration error with bins of equal width or equal mass."""
        return metrics.ece(self, member, num_bins, binning)

    def entropy(self, member: Member) -> Estimate:
        """Entropy of the predictive distribution (nats)."""
        return metrics.entropy(self, member)

    def mutual_information(self, member: Member) -> Estimate:
        """Entropy of the mean minus mean entropy of the samples; for alpha = 1 at T = 1 only."""
        return metrics.mutual_information(self, member)

    # Of numbers

    def crps(self, member: Member) -> Estimate:
        """Continuous ranked probability score, in the unit of the targets."""
        return density_metrics.crps(self, member)

    def rmse(self, member: Member) -> Estimate:
        """Root of the mean squared error of the expected values."""
        return density_metrics.rmse(self, member)

    def coverage(self, member: Member, level: float = 0.9) -> Estimate:
        """Share of targets inside the central interval that should hold a share `level`."""
        return density_metrics.coverage(self, member, level)

    def width(self, member: Member, level: float = 0.9) -> Estimate:
        """Mean width of the central interval of level 0.5 or 0.9."""
        return density_metrics.width(self, member, level)

    def calibration_error(self, member: Member) -> Estimate:
        """Mean over 19 levels of the distance between a level and the share of targets below it."""
        return density_metrics.calibration_error(self, member)

    def quantile_average(self, multiplier: float = 1.0) -> Scores:
        """The means of the samples' quantiles at a multiplier, as deterministic Scores.

        A predictor gives this distribution with `average="quantile"`. It is no power mean, so it is
        beside the family: `quantile_average(0.5).crps(DET)` is to be compared with a member's.
        For the squared error it is the member of alpha 0; a likelihood of your own has it if it
        gives `quantile_mean`.
        """
        return Scores(*density_metrics.quantile_average(self, multiplier))

    def quadrature_error(self, member: Member) -> float:
        """By how much log Z of a member may be off (nats): the largest of all targets.

        Integrals that are off by more than 0.01 nats are refused by the evaluation.
        """
        if member.deterministic or self.protocol.has_classes:
            return 0.0
        return self.field("sampled", "quadrature")[self.index(member)].max().item()

    def summary(self, member: Member, field: str) -> Tensor:
        """[N] what is known of each predicted distribution: `mean_at`, `cdf_at` and others."""
        curve = self.curve_of(member)
        if not isinstance(curve, DensityCurve):
            raise ScoresError(f"{self.request.likelihood} targets are classes, not numbers")
        return curve.summary(field, member.temperature)

    def by_frequency(
        self,
        member: Member,
        counts: Tensor,
        bands: Sequence[tuple[float, float]],
        against: Member | None = None,
    ) -> list[tuple[tuple[float, float], int, Estimate | None]]:
        """XE by how often the target's class, or its label, occurred in training.

        Args:
            member: The member.
            counts: [V] training counts of the classes; of several labels, how often each was 1.
            bands: Pairs (low, high): classes with low < count <= high. They may overlap.
            against: Another member, for paired differences `member` minus `against` instead.

        Returns:
            Band, number of targets and estimate (None for an empty band).
        """
        return metrics.by_frequency(self, member, counts, bands, against)

    def bounds(self, member: Member) -> Bounds:
        """The dropout objective, the member's objective, and the two gaps between them.

        Raises:
            ScoresError: If there is no decomposition: at T ≠ 1 with the temperature on the mean
                and alpha > 0, or where the tempered samples were not evaluated.
        """
        return member_bounds(self, member)

    # Files and merging

    def save(self, path: str | Path) -> None:
        """Writes the scores, atomically, and then removes the finished parts they were made of.

        Raises:
            FileError: If they cannot be written; says which parts are kept.
        """
        pilot = None if self.pilot is None else (self.pilot.protocol, self.pilot.tensors)
        try:
            write_scores(path, self.protocol, self.tensors, pilot)
        except FileError as error:
            if self._parts is None or not self._parts.exists():
                raise
            raise FileError(
                f"{error}. Finished parts are kept in {self._parts}, from which the same "
                "evaluation resumes"
            ) from error
        if self._parts is not None:
            remove_parts(self._parts)

    @classmethod
    def load(cls, path: str | Path) -> Scores:
        """Reads what `save` wrote.

        Raises:
            FileError: If the file is missing, truncated, foreign or of another version.
        """
        found, pilot = read_scores(path)
        return cls(*found, None if pilot is None else cls(*pilot))

    @classmethod
    def merge(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of disjoint data evaluated in parts, as if evaluated at once.

        Parts must share the protocol and number their examples differently
        (`evaluate(first_example=...)`).
        """
        if not parts:
            raise ScoresError("merge needs at least one Scores")
        for part in parts[1:]:
            parts[0].protocol.require_same(part.protocol, "the Scores to merge")
        ordered = sorted(parts, key=lambda part: int(part.examples.min()))
        for before, after in itertools.pairwise(ordered):
            if before.examples.max() >= after.examples.min():
                raise ScoresError(
                    "the Scores to merge number the same examples; evaluate the later part with "
                    f"first_example={int(before.examples.max()) + 1}"
                )
        pilots = [part.pilot for part in ordered if part.pilot is not None]
        pilot = cls.merge(pilots) if len(pilots) == len(parts) else None
        return cls(parts[0].protocol, schema.join([part.tensors for part in ordered], "N"), pilot)

    # What the stored tensors hold

    def has(self, group: Group, field: str = "class") -> bool:
        """Whether a tensor is there; without a field, whether its group is."""
        return schema.name_of(group, field) in self.tensors

    def field(self, group: Group, field: str) -> Tensor:
        """A stored tensor (`scores.schema`)."""
        return self.tensors[schema.name_of(group, field)]

    def index(self, member: Member) -> tuple[int, int]:
        """Row (multiplier) and column (alpha) of a member."""
        grid = self.protocol.grid
        try:
            return grid.stochastic.index(member.multiplier), grid.alphas.index(member.alpha)
        except ValueError:
            remedy = "evaluate with a grid that contains it"
            if member.multiplier in self.only_in_pilot and member.alpha in grid.alphas:
                remedy = (
                    "only the pilot evaluated it, on part of the data (scores.pilot); "
                    f"num_samples={self.predictor_samples} evaluates every multiplier on all data"
                )
            raise ScoresError(
                f"{member!r} was not evaluated: alphas {grid.alphas}, multipliers "
                f"{grid.multipliers}; {remedy}"
            ) from None

    def tempered_index(self, member: Member) -> tuple[int, int]:
        """Row and column of a member among those whose samples were tempered."""
        row, _ = self.index(member)
        return row, self.protocol.grid.tempered_alphas.index(member.alpha)

    @property
    def density_nodes(self) -> Nodes:
        """Nodes of temperature of numbers, relative to the noise variance where that is fitted."""
        nodes = self.protocol.density_nodes
        if self.request.likelihood != "squared_error":
            return nodes
        low, high = (t / self.noise_variance for t in (nodes.low, nodes.high))
        return dataclasses.replace(nodes, low=low, high=high)

    def class_curve(self, member: Member) -> Curve:
        """The member's curve, if targets are classes."""
        curve = self.curve_of(member)
        if isinstance(curve, DensityCurve):
            raise ScoresError(
                f"{self.request.likelihood} targets are numbers, not classes: look at crps, rmse, "
                "coverage, width and calibration_error"
            )
        return curve

    def curve_of(self, member: Member, *, fit: bool = False) -> Curve | DensityCurve:
        """The member's results as functions of the temperature.

        At T = 1 all tempers are the same, and the exact one is used.
        """
        tempered = member.temper != "mean" and (fit or member.temperature != 1)
        key = dataclasses.replace(member, temperature=2.0 if tempered else 1.0)
        if not self.protocol.has_classes and (fit or member.temperature != 1):
            check_temper(self, member)
        if key not in self._curves:
            if not self.protocol.has_classes:
                self._curves[key] = density_curve(self, member)
            elif tempered:
                self._curves[key] = sample_curve(self, member)
            elif member.deterministic:
                self._curves[key] = mean_curve(self, "deterministic", ..., 0)
            else:
                at = self.index(member)
                self._curves[key] = mean_curve(self, "sampled", at, self.num_samples)
        return self._curves[key]

    @property
    def _num_sizes(self) -> int:
        """Numbers of merged blocks whose XE is kept: 1, 2, 4, ..., all of them."""
        return len(self.field("sampled", "curve")) if self.has("sampled", "curve") else 0

    def _estimate(self, values: Values) -> Estimate:
        return estimate(values, self.clusters, shared=self.protocol.shared)
