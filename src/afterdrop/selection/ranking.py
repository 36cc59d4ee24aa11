"""Choosing a member on validation data, corrected for the winner's curse.

Candidates are every member of the grid at T = 1 and at its own fitted temperature; the
deterministic model, plain and tempered, is always among them. Picking the best of a hundred on the
data that rank them flatters the winner, so two checks come with the choice: the gain of the whole
procedure on examples that it did not see (cross-fitting), and how often it would choose the same
member on resampled examples (clustered bootstrap).
"""

import math

import torch
from torch import Tensor

from afterdrop.errors import MemberError, SplitError
from afterdrop.evaluation.scores import Scores
from afterdrop.family.estimates import Estimate, Values, cluster_sums, estimate
from afterdrop.family.member import DET, Member
from afterdrop.masks.uniforms import Plan
from afterdrop.selection.choice import Candidate, Choice, Prefer

_ROUNDING = 1e-6  # of a mean XE
_FEWEST = 10  # the samples of the scores divided by those of the predictor, at most
_WORST = 1e30  # what an infinite XE counts as in sums over some examples


def select(
    scores: Scores,
    *,
    num_samples: int | None = None,
    prefer: Prefer = "best",
    folds: int = 5,
    resamples: int = 200,
    seed: int = 0,
) -> Choice:
    """Chooses a member of the family on validation scores.

    Args:
        scores: Of validation data; scores of the split "test" are refused.
        num_samples: Samples of the predictor that will be used; by default those of the scores.
            Fewer samples cost more cross entropy and want a higher temperature, which is part of
            the comparison.
        prefer: "best", the cheapest of those that are equal but for rounding, or "cheapest": the
            cheapest within one standard error of the best, where deterministic at T = 1 is cheaper
            than tempered, and that than any sampling.
        folds: Folds of examples for the cross-fitted gain; 0 for none.
        resamples: Bootstrap resamples of examples; 0 for none.
        seed: Seed of folds and resamples.

    Returns:
        The choice; prints as a table, saves to a file, and makes a predictor.

    Raises:
        SplitError: If the scores are of test data.
        MemberError: If `num_samples` are less than a tenth of those of the scores.

    Example:
        >>> import afterdrop as ad
        >>> _ = torch.manual_seed(0)
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        >>> data = [(torch.randn(64, 4), torch.randint(3, (64,)))]
        >>> choice = select(ad.evaluate(net, data, num_samples=8))
        >>> choice.ranking[0].difference.value
        0.0
    """
    if not isinstance(scores, Scores):
        raise MemberError(f"scores is {type(scores).__name__}; give what evaluate returned")
    if scores.split.strip().lower() == "test":
        raise SplitError(
            "these are scores of the test split: choosing on them would make any test result "
            "meaningless; select on validation scores, then evaluate the choice on test data"
        )
    if prefer not in ("best", "cheapest"):
        raise MemberError(f"prefer={prefer!r} must be 'best' or 'cheapest'")
    k = scores.num_samples if num_samples is None else num_samples
    Plan(k)  # refuses what no predictor can have
    if k * _FEWEST < scores.num_samples:
        raise MemberError(
            f"num_samples={k}: the loss with {k} samples cannot be predicted from scores of "
            f"{scores.num_samples}; evaluate with num_samples={k}, or select for "
            f"{2 * math.ceil(scores.num_samples / (2 * _FEWEST))} or more"
        )
    if folds == 1 or folds < 0:
        raise MemberError(f"folds={folds} must be 0 (no cross-fitting) or at least 2")
    if resamples < 0:
        raise MemberError(f"resamples={resamples} must be at least 0")
    # Too few examples for folds: say nothing rather than something wrong.
    groups = int(scores.clusters.max()) + 1
    folds = min(folds, groups) if groups >= 4 else 0
    fits = [scores.fit(member, k) for member in scores.members]
    drawn: list[tuple[Member, bool, bool]] = [(m, False, False) for m in scores.members]
    drawn += [(fit.member, True, fit.at_edge) for fit in fits]
    ranking = _rank(scores, drawn, k)
    member = _choose(ranking, prefer)
    plain = scores.values(DET)
    gain = _estimate(scores, plain.minus(_forecast(scores, member, k)))
    tempered = scores.values(fits[0].member).whole
    saved = (plain.whole - tempered).mean().item()
    generator = torch.Generator().manual_seed(seed)
    return Choice(
        member=member,
        request=scores.request,
        fingerprint=scores.protocol.fingerprint,
        temperatures=(scores.protocol.low, scores.protocol.high),
        deterministic=scores.fit(DET).member,
        ranking=ranking,
        gain=gain,
        temperature_share=saved / gain.value if gain.value else math.nan,
        crossfit=_crossfit(scores, k, folds, generator) if folds else None,
        recurrence=_bootstrap(scores, k, resamples, generator) if resamples else (),
        num_samples=k,
        prefer=prefer,
        optimistic=k < scores.num_samples and scores.protocol.plan.scheme != "iid",
    )


def _estimate(scores: Scores, values: Values) -> Estimate:
    return estimate(values, scores.clusters, shared=scores.protocol.shared)


def _forecast(scores: Scores, member: Member, k: int) -> Values:
    """What `k` samples would deliver: fewer never something better, whatever noise says."""
    values = scores.values(member)
    found = values.moved(k)
    if k >= values.num_samples or not found.whole.mean() < values.whole.mean():
        return found
    assert found.halves is not None
    return Values(values.whole, values.whole + found.halves - found.halves.mean(0), k)


def _rank(scores: Scores, drawn: list[tuple[Member, bool, bool]], k: int) -> tuple[Candidate, ...]:
    values = [_forecast(scores, member, k) for member, _, _ in drawn]
    means = [v.whole.mean().item() for v in values]
    order = sorted(range(len(drawn)), key=means.__getitem__)
    best = values[order[0]]
    return tuple(
        Candidate(drawn[i][0], means[i], _estimate(scores, values[i].minus(best)), *drawn[i][1:])
        for i in order
    )


def _choose(ranking: tuple[Candidate, ...], prefer: Prefer) -> Member:
    near = [c for c in ranking if not c.difference.value > _margin(c.difference, prefer)]
    return min(near, key=lambda c: (not c.member.deterministic, c.tuned)).member


def _margin(difference: Estimate, prefer: Prefer) -> float:
    """By how much a candidate may be worse than the best: rounding, or an error if there is one."""
    if prefer == "best" or math.isnan(difference.error):
        return _ROUNDING
    return max(_ROUNDING, difference.error)


def _crossfit(scores: Scores, k: int, folds: int, generator: torch.Generator) -> Estimate:
    """Chooses member and temperature on all folds but one, and measures the gain on that one."""
    clusters = scores.clusters
    groups = int(clusters.max()) + 1
    fold = torch.randperm(groups, generator=generator) % folds
    inside = torch.stack([fold != f for f in range(folds)]).double()
    best = torch.full((folds,), math.inf, dtype=torch.float64)
    chosen = torch.zeros(folds, 3, len(clusters), dtype=torch.float64)  # all samples, then halves
    number, halved = 0.0, True
    for member in scores.members:
        temperatures = scores.fit_weighted(member, inside, k)[0].tolist()
        for f in range(folds):
            for temperature in (1.0, temperatures[f]):
                values = _forecast(scores, member.at_temperature(temperature), k)
                xe = values.whole.clamp_max(_WORST)
                seen = (cluster_sums(xe, clusters) @ inside[f]).item()
                if seen < best[f]:
                    best[f], chosen[f] = seen, values.whole
                    number = max(number, values.num_samples)
                    if values.halves is not None:
                        chosen[f, 1:] = values.halves
                    halved &= values.halves is not None or values.num_samples == 0
    own = fold[clusters].expand(1, 3, -1)
    gains = scores.values(DET).whole - chosen.gather(0, own).squeeze(0)
    return _estimate(scores, Values(gains[0], gains[1:] if halved else None, number))


def _bootstrap(
    scores: Scores, k: int, resamples: int, generator: torch.Generator
) -> tuple[tuple[Member, bool, float], ...]:
    """Share of resampled sets of examples in which each candidate wins, temperatures refitted."""
    clusters = scores.clusters
    groups = int(clusters.max()) + 1
    sizes = cluster_sums(torch.ones(len(clusters), dtype=torch.float64), clusters)
    drawn = torch.randint(groups, (resamples, groups), generator=generator)
    weights = torch.zeros(resamples, groups, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(weights))
    totals = weights @ sizes
    rows: list[Tensor] = []
    names: list[tuple[Member, bool]] = []
    for member in scores.members:
        values = _forecast(scores, member, k).whole.clamp_max(_WORST)
        rows.append(weights @ cluster_sums(values, clusters) / totals)
        rows.append(scores.fit_weighted(member, weights, k)[1])
        names += [(member, False), (member, True)]
    wins = torch.stack(rows).argmin(0).bincount(minlength=len(rows)).double() / resamples
    order = wins.argsort(descending=True, stable=True)
    return tuple((*names[i], wins[i].item()) for i in order.tolist() if wins[i] > 0)
