"""How far a choice can be trusted: the same choice on parts and on resamples of the examples.

Three checks share one pass over the members, each as rows of weights over the examples:

    cross-fit    choose on all folds but one, measure the gain on that one; the examples are dealt
                 to folds several times, and the gain of a target is the mean over the deals
    recurrence   resample the examples (clustered bootstrap) and choose again. This tells how narrow
                 the choice was on these data. Independent data agree less often, because resamples
                 repeat what is peculiar to these.
    agreement    divide the examples into two halves and choose on each: how often independent data
                 of half the size agree

Legend: R rows of weights, G examples or other clusters of targets.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from afterdrop.evaluation.scores import Scores
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import DET, Member
from afterdrop.selection.criteria import WORST, Criterion, weighted_means

DEALS = 4  # how often the examples are dealt to folds
SPLITS = 50  # divisions into halves
FEWEST = 4  # examples from which folds and halves are made

Recurrence = tuple[tuple[Member, bool, float], ...]


@dataclasses.dataclass(frozen=True)
class Stability:
    """What the checks found.

    Attributes:
        crossfit: Gain over deterministic evaluation at T = 1 of choosing, on data that did not
            choose; None without folds.
        recurrence: Share of resamples whose best is (alpha, multiplier, tuned or not).
        agreement: Share of divisions into halves that have the same best; None if not asked for.
    """

    crossfit: Estimate | None
    recurrence: Recurrence
    agreement: float | None


def check_stability(
    scores: Scores,
    criterion: Criterion,
    k: int,
    gain: float,
    folds: int,
    resamples: int,
    seed: int,
) -> Stability:
    """Chooses again on parts and resamples of the examples.

    Args:
        scores: The scores.
        criterion: What is minimised.
        k: Samples of the predictor.
        gain: What the choice gains on the data that chose.
        folds: Folds of examples; 0 for no cross-fitting.
        resamples: Bootstrap resamples of examples; 0 for neither these nor halves.
        seed: Seed of all draws.
    """
    groups = int(scores.clusters.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    folds = min(folds, groups) if groups >= FEWEST else 0  # too few examples show nothing
    halves = SPLITS if resamples and groups >= FEWEST else 0
    parts = [
        _folds(groups, folds, generator),
        _bootstrap(groups, resamples if groups > 1 else 0, generator),
        _halves(groups, halves, generator),
    ]
    if not sum(map(len, parts)):
        return Stability(None, (), None)
    candidates = _Candidates.of(scores, criterion, k, torch.cat(parts))
    inside, again, split = candidates.best.split([len(part) for part in parts])
    crossfit = None
    if len(inside):
        crossfit = _crossfit(scores, criterion, k, candidates, parts[0], gain)
    agreement = (split[0::2] == split[1::2]).double().mean().item() if len(split) else None
    return Stability(crossfit, candidates.shares(again), agreement)


def _folds(groups: int, folds: int, generator: torch.Generator) -> Tensor:
    """Rows [DEALS · folds, G] that leave one fold out."""
    deals = [
        torch.randperm(groups, generator=generator) % folds for _ in range(DEALS if folds else 0)
    ]
    rows = [deal != fold for deal in deals for fold in range(folds)]
    return torch.stack(rows).double() if rows else torch.zeros(0, groups).double()


def _bootstrap(groups: int, resamples: int, generator: torch.Generator) -> Tensor:
    """Rows [resamples, G] of how often each example was drawn."""
    drawn = torch.randint(groups, (resamples, groups), generator=generator)
    weights = torch.zeros(resamples, groups, dtype=torch.float64)
    return weights.scatter_add_(1, drawn, torch.ones_like(weights))


def _halves(groups: int, splits: int, generator: torch.Generator) -> Tensor:
    """Rows [2 · splits, G]: a half of the examples, then the other half."""
    rows = torch.zeros(splits, 2, groups, dtype=torch.float64)
    for row in rows:
        order = torch.randperm(groups, generator=generator)
        row[0, order[: groups // 2]] = 1
        row[1, order[groups // 2 : groups // 2 * 2]] = 1
    return rows.flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class _Candidates:
    """Every member at T = 1, followed by itself at the temperature that suits the row of weights.

    Attributes:
        members: At T = 1.
        best: [R] the number of the candidate with the lowest loss.
        temperatures: [members, R] fitted ones.
    """

    members: list[Member]
    best: Tensor
    temperatures: Tensor

    @classmethod
    def of(cls, scores: Scores, criterion: Criterion, k: int, weights: Tensor) -> _Candidates:
        rows: list[Tensor] = []
        temperatures: list[Tensor] = []
        for member in scores.members:
            values = criterion.values(scores, member, k).whole
            temperature, loss, _ = criterion.fit_weighted(scores, member, weights, k)
            rows += [weighted_means(values, scores.clusters, weights), loss.clamp_max(WORST)]
            temperatures.append(temperature)
        return cls(scores.members, torch.stack(rows).argmin(0), torch.stack(temperatures))

    def member(self, row: int) -> Member:
        """The best member of a row, at its temperature."""
        number, tuned = divmod(int(self.best[row]), 2)
        temperature = self.temperatures[number, row].item() if tuned else 1.0
        return self.members[number].at_temperature(temperature)

    def shares(self, best: Tensor) -> Recurrence:
        """How often each candidate is the best, most often first."""
        names = [(member, tuned) for member in self.members for tuned in (False, True)]
        wins = best.bincount(minlength=len(names)).double() / max(1, len(best))
        order = wins.argsort(descending=True, stable=True)
        return tuple((*names[i], wins[i].item()) for i in order.tolist() if wins[i] > 0)


def _crossfit(
    scores: Scores,
    criterion: Criterion,
    k: int,
    candidates: _Candidates,
    inside: Tensor,
    gain: float,
) -> Estimate:
    """The gain on the folds that did not choose.

    The spread between targets is that of fixed choices. The choice differs between data sets, and
    the one made on all data from those of the folds; this adds about what choosing on the same data
    overstates: the gain there minus the cross-fitted one. Both are added, as they are not
    independent. On simulated data sets of 40 to 1,000 examples, 1.96 errors then cover the true
    gain of the choice in 91 to 100 % of them (`benchmarks/bench_statistics_crossfit.py`).
    """
    clusters = scores.clusters
    plain = criterion.values(scores, DET, k).whole
    rows = 1 + scores.protocol.plan.num_halves
    gains = torch.zeros(rows, len(clusters), dtype=torch.float64)  # all samples, then halves
    number, halved, moved = 0.0, True, 0.0
    for row in range(len(inside)):
        values = criterion.values(scores, candidates.member(row), k)
        outside = inside[row][clusters] == 0
        halves = values.whole if values.halves is None else values.halves
        gains[0, outside] += (plain - values.whole)[outside] / DEALS
        gains[1:, outside] += (plain - halves)[..., outside] / DEALS
        number, moved = max(number, values.num_samples), max(moved, values.moved_error)
        halved &= values.halves is not None or values.num_samples == 0
    values = Values(gains[0], gains[1:] if halved else None, number, moved_error=moved)
    found = estimate(values, clusters, shared=scores.protocol.shared)
    if not math.isfinite(gain - found.value):
        return found
    error = found.error + abs(gain - found.value)
    masks = 0.0 if math.isnan(found.mc_error) else found.mc_error
    return dataclasses.replace(found, data_error=math.sqrt(error**2 - masks**2))
