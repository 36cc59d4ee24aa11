"""Choosing a member on validation data, corrected for the winner's curse.

Candidates are every member of the grid at T = 1 and at its own fitted temperature; the
deterministic model, plain and tempered, is always among them. Picking the best of a hundred on the
data that rank them flatters the winner, so two checks come with the choice: the gain of the whole
procedure on examples that it did not see (cross-fitting), and how often it would choose the same
member on resampled examples and on halves of them (`stability`).
"""

import dataclasses
import math
import warnings
from collections.abc import Mapping

from afterdrop.errors import MemberError, ScoresError, SplitError
from afterdrop.evaluation.scores import Fit, Scores
from afterdrop.family.estimates import Estimate, Values, estimate
from afterdrop.family.member import DET, Member
from afterdrop.masks.sites import effective_draws
from afterdrop.masks.uniforms import Plan
from afterdrop.selection.candidate import Candidate, OtherData
from afterdrop.selection.choice import Choice, Prefer
from afterdrop.selection.criteria import Criterion, Losses, loss_elsewhere
from afterdrop.selection.ensemble_gain import ensemble_gain
from afterdrop.selection.stability import check_stability

_ROUNDING = 1e-6  # of a mean XE
_MOST_RESAMPLES = 1_000_000  # each takes a number per example
_FEWEST = 10  # the samples of the scores divided by those of the predictor, at most


def select(
    scores: Scores,
    *,
    by: str | Losses = "xe",
    also: Mapping[str, Scores] | None = None,
    num_samples: int | None = None,
    prefer: Prefer = "best",
    folds: int = 5,
    resamples: int = 200,
    seed: int = 0,
) -> Choice:
    """Chooses a member of the family on validation scores.

    Args:
        scores: Of validation data; scores of the split "test" are refused.
        by: What to minimise: "xe" (cross entropy), "brier", "accuracy", "ece", "crps" (predictions
            of numbers), or a function of (scores, member) that returns the losses [N] of the
            targets. Temperatures are fitted to the same.
        also: Scores of other data by name, such as corrupted or out of domain: the choice is made
            without them, and shows what it does there. Warns where it is worse than deterministic
            at T = 1 by more than two standard errors.
        num_samples: Samples of the predictor that will be used; by default those of the scores, or,
            by XE, 100 where `evaluate(num_samples="auto")` found how many the scores need.
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
            one sample are asked about another number, or `by` is not a criterion of these scores.
        ScoresError: If `also` has scores of other weights.

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
    if also is not None and not isinstance(also, Mapping):
        raise MemberError(
            f"also is {type(also).__name__}; give Scores of other data by name, as in "
            "also={'noisy': scores}"
        )
    others = dict(also or {})
    _check_scores(scores, others)
    if prefer not in ("best", "cheapest"):
        raise MemberError(f"prefer={prefer!r} must be 'best' or 'cheapest'")
    if folds == 1 or folds < 0:
        raise MemberError(f"folds={folds} must be 0 (no cross-fitting) or at least 2")
    if not 0 <= resamples <= _MOST_RESAMPLES:
        raise MemberError(f"resamples={resamples} must be between 0 and {_MOST_RESAMPLES:,}")
    criterion = Criterion.of(by)
    if num_samples is None:  # other losses than XE are only known for the samples evaluated
        by_xe = criterion.losses is None
        num_samples = scores.predictor_samples if by_xe else scores.num_samples
    k = num_samples
    _check_samples(scores, criterion, k)
    drawn = _drawn(scores, criterion, k)
    fits = [fit for fit, tuned in drawn if tuned]
    ranking = _rank(scores, criterion, others, drawn, k)
    member = _choose(ranking, prefer)
    plain = criterion.values(scores, DET, k)
    gain = _estimate(scores, plain.minus(criterion.values(scores, member, k)))
    tempered = criterion.values(scores, fits[0].member, k).whole
    saved = (plain.whole - tempered).mean().item()
    checks = check_stability(scores, criterion, k, gain.value, folds, resamples, seed)
    ensemble = scores.protocol.ensemble
    return Choice(
        member=member,
        request=scores.resolved_request,
        fingerprint=scores.protocol.fingerprint,
        temperatures=(scores.protocol.low, scores.protocol.high),
        deterministic=fits[0].member,
        ranking=ranking,
        gain=gain,
        temperature_share=saved / gain.value if gain.value else math.nan,
        crossfit=checks.crossfit,
        recurrence=checks.recurrence,
        agreement=checks.agreement,
        num_samples=k,
        prefer=prefer,
        pilot=_only_in_pilot(scores, criterion, k),
        optimistic=k < scores.num_samples and scores.protocol.plan.scheme != "iid",
        left_off=tuple(
            f"{name or '(root)'} {what}" for name, what in effective_draws(scores.protocol.off)
        ),
        by=criterion.name,
        unit=criterion.unit,
        also=_elsewhere(others, criterion, member, k),
        ensemble=None if ensemble is None else ensemble_gain(scores, ensemble, member),
    )


def _check_scores(scores: Scores, others: Mapping[str, Scores]) -> None:
    """Refuses scores that no choice may use, and other data that do not belong to it."""
    for name, found in {"scores": scores, **others}.items():
        if not isinstance(found, Scores):
            raise MemberError(f"{name} is {type(found).__name__}; give what evaluate returned")
        if found.split.strip().lower() == "test":
            raise SplitError(
                "these are scores of the test split: choosing on them would make any test result "
                "meaningless; select on validation scores, then evaluate the choice on test data"
            )
        if found.protocol.fingerprint != scores.protocol.fingerprint:
            raise ScoresError(
                f"also[{name!r}] are scores of other weights; evaluate the same model on the other "
                "data"
            )
        mine, theirs = scores.protocol.ensemble, found.protocol.ensemble
        if (mine is None) != (theirs is None) or (
            mine is not None and theirs is not None and mine.best != theirs.best
        ):
            raise ScoresError(
                f"also[{name!r}] compares with another model alone; evaluate the other data with "
                f"single={None if mine is None else mine.best}"
            )


def _check_samples(scores: Scores, criterion: Criterion, k: int) -> None:
    """Refuses a number of samples whose loss the scores do not tell."""
    if scores.protocol.ensemble is not None and k != scores.num_samples:
        raise MemberError(
            f"num_samples={k}: an ensemble predicts with the {scores.num_samples} samples that "
            "were evaluated; evaluate those of its members that will be used"
        )
    if scores.protocol.ensemble is None:
        Plan(k)  # refuses what no predictor can have
    if criterion.losses is not None and k != scores.num_samples:
        raise MemberError(
            f"num_samples={k}: by={criterion.name!r} is known for the {scores.num_samples} samples "
            f"that were evaluated only; evaluate with num_samples={k}"
        )
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


def _estimate(scores: Scores, values: Values) -> Estimate:
    return estimate(values, scores.clusters, shared=scores.protocol.shared)


def _drawn(scores: Scores, criterion: Criterion, k: int) -> list[tuple[Fit, bool]]:
    """Every member at T = 1, then at its fitted temperature, with whether that was fitted."""
    plain = [(Fit(member, False), False) for member in scores.members]
    return plain + [(criterion.fit(scores, member, k), True) for member in scores.members]


def _rank(
    scores: Scores,
    criterion: Criterion,
    others: Mapping[str, Scores],
    drawn: list[tuple[Fit, bool]],
    k: int,
) -> tuple[Candidate, ...]:
    values = [criterion.values(scores, fit.member, k) for fit, _ in drawn]
    means = [_or_infinite(v.whole.mean().item()) for v in values]
    order = sorted(range(len(drawn)), key=means.__getitem__)
    best = values[order[0]]
    return tuple(
        Candidate(
            drawn[i][0].member,
            means[i],
            _estimate(scores, values[i].minus(best)),
            drawn[i][1],
            drawn[i][0].at_edge,
            tuple(loss_elsewhere(criterion, o, drawn[i][0].member, k) for o in others.values()),
        )
        for i in order
    )


def _elsewhere(
    others: Mapping[str, Scores], criterion: Criterion, member: Member, k: int
) -> tuple[OtherData, ...]:
    """What a choice does on other data; warns where it does harm."""
    found = []
    for name, other in others.items():
        try:
            plain, chosen = (criterion.values(other, m, k) for m in (DET, member))
        except ScoresError as error:
            raise ScoresError(
                f"also[{name!r}] lacks the choice: {error}. Evaluate the other data with the grid "
                "of the scores that choose: grid=scores.request.grid"
            ) from error
        gain = _estimate(other, plain.minus(chosen))
        if other.protocol.ensemble is not None:  # the same samples predict there
            gain = dataclasses.replace(gain, mc_error=0.0)
        found.append(OtherData(name, gain))
        if found[-1].worse:
            warnings.warn(
                f"the choice is worse than the deterministic model at T = 1 on {name!r} by "
                f"{-found[-1].gain.value:.4f} ± {found[-1].gain.error:.4f} {criterion.unit}: what "
                "is best on the data that chose need not be best there",
                stacklevel=3,
            )
    return tuple(found)


def _only_in_pilot(scores: Scores, criterion: Criterion, k: int) -> tuple[Candidate, ...] | None:
    """The best candidate of each multiplier that only the pilot evaluated, by its results."""
    if scores.pilot is None:
        return None
    drawn = _drawn(scores.pilot, criterion, k)
    best: dict[float, Candidate] = {}
    for candidate in _rank(scores.pilot, criterion, {}, drawn, k):
        best.setdefault(candidate.member.multiplier, candidate)
    return tuple(best[m] for m in scores.only_in_pilot)


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
