"""The outcome in plain words, for readers who never read the paper."""

import math

from afterdrop.family.estimates import Estimate
from afterdrop.family.member import DET, Member
from afterdrop.report.run_outcome import Outcome


def number(value: float, digits: int = 4) -> str:
    """A number, or n/a where there is none.

    Example:
        >>> number(0.12345), number(math.nan)
        ('0.1235', 'n/a')
    """
    return f"{value:.{digits}f}".replace("-", "−") if math.isfinite(value) else "n/a"


def signed(value: float, digits: int = 4) -> str:
    """A number with its sign.

    Example:
        >>> signed(0.5, 1), signed(-0.5, 1)
        ('+0.5', '−0.5')
    """
    return ("+" if value >= 0 else "") + number(value, digits)


def with_error(found: Estimate) -> str:
    """A value and its standard error."""
    return f"{number(found.value)} ± {number(found.error)}"


def in_words(member: Member, num_samples: int) -> str:
    """What predicting with a member means.

    Example:
        >>> in_words(Member(1.0, 1.0, 1.05), 100)
        'the arithmetic mean of 100 dropout samples at the training rates, temperature 1.05'
    """
    if member.deterministic:
        name = "ordinary evaluation (dropout switched off)"
    else:
        kind = {0.0: "geometric mean", 1.0: "arithmetic mean"}.get(
            member.alpha, f"power mean (α = {member.alpha:g})"
        )
        rates = "the training rates"
        if member.multiplier != 1:
            rates = f"{member.multiplier:g} times {rates}"
        name = f"the {kind} of {num_samples} dropout samples at {rates}"
    each = " on each sample" if member.temper == "sample" else ""
    return f"{name}, temperature {member.temperature:.3g}{each}"


def headline(outcome: Outcome, unit: str) -> str:
    """What was chosen and what it gained, in one or two sentences."""
    if outcome.member == DET:
        return (
            "Nothing to gain here: of all ways to predict from these weights, ordinary evaluation "
            "(dropout switched off, temperature 1) is the best."
        )
    found, _ = outcome.evidence
    scores = outcome.scores if outcome.test is None else outcome.test
    change = 100 * math.expm1(found.value)
    makes = "makes" if abs(found.value) >= 2 * found.error else "may make"
    what, than = f"{in_words(outcome.member, outcome.num_samples)},", "ordinary evaluation"
    if outcome.member.deterministic:
        what = f"dropout switched off, as usual, but temperature {outcome.member.temperature:.3g}"
        than = "temperature 1"
    much = f"{abs(change):.1f} %" if abs(change) >= 0.05 else "less than 0.1 %"
    text = (
        f"Predicting with {what} {makes} the right answer {much} "
        f"{'more' if change >= 0 else 'less'} probable (geometric mean over targets) than {than} "
        "does, on the same weights."
    )
    if makes == "may make":
        text += " That much could also be chance."
    if unit == "word":
        at_k = scores.xe(outcome.member).at(outcome.num_samples)
        before, after = scores.perplexity(DET), math.exp(at_k)
        text += f" Perplexity on {scores.split} data goes from {before:.2f} to {after:.2f}."
    return text


def verdict(found: Estimate, above: str = "gain", below: str = "loss") -> str:
    """How certain a gain is, from its distance to zero in standard errors.

    Args:
        found: The gain, or another difference.
        above: What it is called above zero.
        below: What it is called below zero.

    Example:
        >>> verdict(Estimate(0.04, 0.04, 0.0, 0.01, 0))
        'a clear gain: 4.0 standard errors above zero'
        >>> verdict(Estimate(0.01, 0.01, 0.0, 0.01, 0))
        'within 1.0 standard errors of zero: this much data cannot tell it from no gain'
    """
    if not (found.error > 0 and math.isfinite(found.value)):
        return "its error cannot be told from these data"
    distance = abs(found.value) / found.error
    if distance < 2:
        return (
            f"within {distance:.1f} standard errors of zero: this much data cannot tell it from no "
            f"{above}"
        )
    side = "above" if found.value > 0 else "below"
    kind = above if found.value > 0 else below
    strength = "clear" if distance >= 3 else "likely"
    return f"a {strength} {kind}: {distance:.1f} standard errors {side} zero"


def certainty(outcome: Outcome) -> list[str]:
    """How sure the gain and the choice are, a sentence each."""
    found, source = outcome.evidence
    lines = [f"The gain is {with_error(found)} nats a target, {source}. That is {verdict(found)}."]
    selection = outcome.selection
    if outcome.test_gain is not None:
        text = f"On {outcome.scores.split} data it was {with_error(outcome.gain)}"
        if selection is not None and selection.crossfit is not None:
            text += f" ({with_error(selection.crossfit)} cross-fitted)"
        lines.append(text + ".")
    share = outcome.temperature_share
    if math.isfinite(share) and not outcome.member.deterministic:
        lines.append(
            f"A temperature alone, which needs no samples, gives {100 * share:.0f} % of the gain "
            f"on {outcome.scores.split} data."
        )
    if selection is not None and selection.recurrence:
        base, tuned = outcome.member.at_temperature(1.0), outcome.member.temperature != 1
        share = sum(s for m, t, s in selection.recurrence if (m, t) == (base, tuned))
        lines.append(
            f"The choice itself: on resampled examples the same member wins in {100 * share:.0f} % "
            "of the cases. Where that is low, several members are about as good."
        )
    return lines
