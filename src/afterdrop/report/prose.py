"""The outcome of a run in sentences, for readers who have not read the paper."""

import math

from afterdrop.evaluation import Scores
from afterdrop.evaluation.ensemble import Ensemble
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import DET, Member
from afterdrop.family.presentation import perplexity
from afterdrop.report.run_outcome import Outcome


def number(value: float, digits: int = 4) -> str:
    """A formatted number, or n/a if it is not finite.

    Example:
        >>> number(0.12345), number(math.nan)
        ('0.1235', 'n/a')
    """
    return f"{value:.{digits}f}".replace("-", "−") if math.isfinite(value) else "n/a"


def signed(value: float, digits: int = 4) -> str:
    """A formatted number with its sign.

    Example:
        >>> signed(0.5, 1), signed(-0.5, 1)
        ('+0.5', '−0.5')
    """
    return ("+" if value >= 0 else "") + number(value, digits)


def with_error(found: Estimate) -> str:
    """A formatted value with its standard error."""
    return f"{number(found.value)} ± {number(found.error)}"


def split_name(split: str) -> str:
    """The name of a split in a sentence.

    Example:
        >>> split_name("valid"), split_name("test")
        ('validation', 'test')
    """
    return {"train": "training", "valid": "validation"}.get(split, split)


def describe(member: Member, num_samples: int, ensemble: Ensemble | None = None) -> str:
    """How a member makes predictions.

    Example:
        >>> describe(Member(1.0, 1.0, 1.05), 100)
        'the arithmetic mean of 100 dropout samples at the training rates, temperature 1.05'
    """
    if ensemble is not None and (member.deterministic or ensemble.masks is None):
        name, _, tail = ensemble.label(member).rpartition(", T = ")
        return f"the {name} members, temperature {tail}".replace("alone members", "alone")
    if member.deterministic:
        name = "deterministic evaluation (dropout switched off)"
    else:
        kind = {0.0: "geometric mean", 1.0: "arithmetic mean"}.get(
            member.alpha, f"power mean (α = {member.alpha:g})"
        )
        rates = "the training rates"
        if member.multiplier != 1:
            rates = f"{member.multiplier:g} times {rates}"
        samples = f"{num_samples} dropout sample{'s' * (num_samples != 1)}"
        name = f"the {kind} of {samples} at {rates}"
    each = "" if member.temper == "mean" else f" applied to each {member.temper}"
    return f"{name}, temperature {member.temperature:.3g}{each}"


def headline(outcome: Outcome, unit: str) -> str:
    """What was chosen and what it gains, in one to three sentences."""
    if outcome.member.unchanged and outcome.ensemble is not None:
        return "There is nothing to gain: the best member alone, at temperature 1, is the best."
    if outcome.member.unchanged:
        return (
            "There is nothing to gain: of all ways to predict from these weights, deterministic "
            "evaluation (dropout switched off, temperature 1) is the best."
        )
    found, _ = outcome.evidence
    scores = outcome.scores if outcome.test is None else outcome.test
    clear = abs(found.value) >= 2 * found.error
    what = f"{describe(outcome.member, outcome.num_samples, outcome.ensemble)},"
    than = "deterministic evaluation of the same weights"
    if outcome.ensemble is not None:
        than = f"the best member alone ({outcome.ensemble.names[outcome.ensemble.best]})"
    elif outcome.member.deterministic:
        what = f"dropout switched off and temperature {outcome.member.temperature:.3g}"
        than = "temperature 1 of the same weights"
    effect = _more_probable if scores.protocol.has_classes else _higher_density
    text = f"Predicting with {what} {effect(found.value, clear)} {than}."
    if not clear:
        text += " The difference may be due to chance."
    if unit == "word":
        at_k = scores.xe(outcome.member).at(outcome.num_samples)
        before, after = scores.perplexity(DET).value, perplexity(at_k)
        split = split_name(scores.split)
        text += f" Perplexity on {split} data changes from {before:.2f} to {after:.2f}."
    return text


def _more_probable(gain: float, clear: bool) -> str:
    """What a gain in nats means for classes.

    Example:
        >>> _more_probable(0.01, True)
        'makes the correct answer 1.0 % more probable (geometric mean over targets) than'
    """
    return (
        f"{'makes' if clear else 'may make'} the correct answer {_share(gain)} "
        f"{'more' if gain >= 0 else 'less'} probable (geometric mean over targets) than"
    )


def _share(gain: float) -> str:
    """By how much a gain in nats makes an answer more or less probable.

    Example:
        >>> _share(0.1), _share(-0.0001), _share(3302.0)
        ('10.5 %', 'less than 0.1 %', 'more than a million times')
    """
    if gain > math.log(1e6):
        return "more than a million times"
    change = abs(100 * math.expm1(gain))
    return f"{change:.1f} %" if change >= 0.05 else "less than 0.1 %"


def _higher_density(gain: float, clear: bool) -> str:
    """What a gain in nats means for numbers, whose densities are not probabilities.

    Example:
        >>> _higher_density(-0.5, False)
        'may lower the log-density of the targets by 0.5000 nats on average, compared with'
    """
    verb = "raise" if gain >= 0 else "lower"
    return (
        f"{f'{verb}s' if clear else f'may {verb}'} the log-density of the targets by "
        f"{number(abs(gain))} nats on average, compared with"
    )


def loss_label(scores: Scores) -> str:
    """The head of a column of losses: cross entropies of classes, NLL of numbers."""
    return "XE (nats)" if scores.protocol.has_classes else "NLL (nats)"


def verdict(found: Estimate, above: str = "gain", below: str = "loss") -> str:
    """Whether a gain is significant, from its distance to zero in standard errors.

    Args:
        found: The gain, or any other difference.
        above: What a positive difference is called.
        below: What a negative difference is called.

    Example:
        >>> verdict(Estimate(0.04, 0.04, 0.0, 0.01, 0))
        'a clear gain: 4.0 standard errors above zero'
        >>> verdict(Estimate(0.01, 0.01, 0.0, 0.01, 0))
        'not significant: 1.0 standard errors from zero, consistent with no gain'
    """
    if not (found.error > 0 and math.isfinite(found.value)):
        return "of unknown significance: these data give no standard error"
    distance = abs(found.value) / found.error
    if distance < 2:
        return (
            f"not significant: {distance:.1f} standard errors from zero, consistent with no {above}"
        )
    side = "above" if found.value > 0 else "below"
    kind = above if found.value > 0 else below
    strength = "clear" if distance >= 3 else "likely"
    return f"a {strength} {kind}: {distance:.1f} standard errors {side} zero"


def certainty(outcome: Outcome) -> list[str]:
    """How certain the gain and the choice are, one item per remark."""
    found, source = outcome.evidence
    lines = [
        f"The gain is {with_error(found)} nats per target, {source}. This is {verdict(found)}."
    ]
    selection = outcome.selection
    if outcome.test_gain is not None:
        text = f"On {split_name(outcome.scores.split)} data the gain is {with_error(outcome.gain)}"
        if selection is not None and selection.crossfit is not None:
            text += f" ({with_error(selection.crossfit)} cross-fitted)"
        lines.append(text + ".")
    share = outcome.temperature_share
    if math.isfinite(share) and not outcome.member.deterministic:
        lines.append(
            f"Temperature alone, which needs no samples, gives {100 * share:.0f} % of the gain on "
            f"{split_name(outcome.scores.split)} data."
        )
    if selection is not None and selection.recurrence:
        base, tuned = outcome.member.at_temperature(1.0), outcome.member.temperature != 1
        share = sum(s for m, t, s in selection.recurrence if (m, t) == (base, tuned))
        lines.append(
            f"When the examples are resampled, the same member is chosen in {100 * share:.0f} % of "
            "the cases. If this share is low, several members are about equally good."
        )
    if selection is not None and selection.agreement is not None:
        lines.append(
            "Other data would choose it less often than resamples do: two disjoint halves of the "
            f"examples have the same best member in {100 * selection.agreement:.0f} % of divisions."
        )
    return lines
