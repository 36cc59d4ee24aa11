"""Choosing a member on validation data, corrected for the winner's curse.

Candidates are every member of the grid at T = 1 and at its own fitted temperature; the
deterministic model, plain and tempered, is always among them. Picking the best of a hundred on the
data that rank them flatters the winner, so two checks come with the choice: the gain of the whole
procedure on examples that it did not see (cross-fitting), and how often it would choose the same
member on resampled examples and on halves of them (`stability`).
"""

import math

from afterdrop.errors import MemberError, SplitError
from afterdrop.evaluation.scores import Scores
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import DET, Member
from afterdrop.masks.sites import effective_draws
from afterdrop.masks.uniforms import Plan
from afterdrop.selection.choice import Candidate, Choice, Prefer
from afterdrop.selection.stability import check_stability, forecast

_ROUNDING = 1e-6  # of a mean XE
_FEWEST = 10  # the samples of the scores divided by those of the predictor, at most


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
        resamples: Bootstrap resamples of examples; 0 for neither these nor halves of the examples.
        seed: Seed of folds, resamples and halves.

    Returns:
        The choice; prints as a table, saves to a file, and makes a predictor.

    Raises:
        SplitError: If the scores are of test data.
        MemberError: If `num_samples` are less than a tenth of those of the scores, or scores of
            one sample are asked about another number.

    Example:
        >>> import torch
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
    if scores.num_samples == 1 and k != 1:
        raise MemberError(
            f"num_samples={k}: scores of one sample do not tell what {k} samples deliver; evaluate "
            f"with num_samples={k}"
        )
    if folds == 1 or folds < 0:
        raise MemberError(f"folds={folds} must be 0 (no cross-fitting) or at least 2")
    if resamples < 0:
        raise MemberError(f"resamples={resamples} must be at least 0")
    fits = [scores.fit(member, k) for member in scores.members]
    drawn: list[tuple[Member, bool, bool]] = [(m, False, False) for m in scores.members]
    drawn += [(fit.member, True, fit.at_edge) for fit in fits]
    ranking = _rank(scores, drawn, k)
    member = _choose(ranking, prefer)
    plain = scores.values(DET)
    gain = _estimate(scores, plain.minus(forecast(scores, member, k)))
    tempered = scores.values(fits[0].member).whole
    saved = (plain.whole - tempered).mean().item()
    checks = check_stability(scores, k, gain.value, folds, resamples, seed)
    return Choice(
        member=member,
        request=scores.request,
        fingerprint=scores.protocol.fingerprint,
        temperatures=(scores.protocol.low, scores.protocol.high),
        deterministic=scores.fit(DET).member,
        ranking=ranking,
        gain=gain,
        temperature_share=saved / gain.value if gain.value else math.nan,
        crossfit=checks.crossfit,
        recurrence=checks.recurrence,
        agreement=checks.agreement,
        num_samples=k,
        prefer=prefer,
        optimistic=k < scores.num_samples and scores.protocol.plan.scheme != "iid",
        left_off=tuple(
            f"{name or '(root)'} {what}" for name, what in effective_draws(scores.protocol.off)
        ),
    )


def _estimate(scores: Scores, values: Values) -> Estimate:
    return estimate(values, scores.clusters, shared=scores.protocol.shared)


def _rank(scores: Scores, drawn: list[tuple[Member, bool, bool]], k: int) -> tuple[Candidate, ...]:
    values = [forecast(scores, member, k) for member, _, _ in drawn]
    means = [_or_infinite(v.whole.mean().item()) for v in values]
    order = sorted(range(len(drawn)), key=means.__getitem__)
    best = values[order[0]]
    return tuple(
        Candidate(drawn[i][0], means[i], _estimate(scores, values[i].minus(best)), *drawn[i][1:])
        for i in order
    )


def _or_infinite(xe: float) -> float:
    return math.inf if math.isnan(xe) else xe


def _choose(ranking: tuple[Candidate, ...], prefer: Prefer) -> Member:
    near = [c for c in ranking if not c.difference.value > _margin(c.difference, prefer)]
    return min(near, key=lambda c: (not c.member.deterministic, c.tuned)).member


def _margin(difference: Estimate, prefer: Prefer) -> float:
    """By how much a candidate may be worse than the best: rounding, or an error if there is one."""
    if prefer == "best" or math.isnan(difference.error):
        return _ROUNDING
    return max(_ROUNDING, difference.error)
