"""A choice in words: its headline, and the table that is printed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from afterdrop.family.estimates import Estimate
from afterdrop.plain_text import one_line
from afterdrop.selection.candidate import Candidate

if TYPE_CHECKING:
    from afterdrop.selection.choice import Choice


def headline(choice: Choice) -> str:
    """What was gained over deterministic evaluation, and what temperature alone gives."""
    plain = _baseline(choice)
    if choice.member.unchanged:
        return f"Nothing gained: {plain} at T = 1 is chosen."
    if math.isinf(choice.gain.value):
        return f"{plain.capitalize()} at T = 1 calls a target impossible; the choice does not."
    text = f"Gained {_shown(choice.gain, choice.unit)} over {plain} at T = 1"
    if choice.crossfit is not None:
        text += f" (this ± ignores the selection; {choice.crossfit.value:.4f} ± "
        text += f"{choice.crossfit.error:.4f} cross-fitted"
        text += ")" if choice.prefer == "best" else ", taking the best)"
    elif not math.isnan(choice.gain.error):
        text += " (this ± ignores the selection)"
    if choice.gain.value > 0:
        text += f"; temperature alone gives {100 * choice.temperature_share:.0f} % of it"
    return one_line(text + ".")


def _baseline(choice: Choice) -> str:
    if choice.ensemble is None:
        return "deterministic evaluation"
    members = choice.ensemble.ensemble
    return f"the best member alone ({members.names[members.best]})"


def choice_text(choice: Choice) -> str:
    """The choice as it is printed: gain, ranking, how sure it is, what to know of it."""
    chosen = next((c for c in choice.ranking if c.member == choice.member), None)
    lines = [
        headline(choice),
        f"Chosen ({choice.prefer}, for {choice.num_samples} samples): "
        f"{choice.label(choice.member)}",
        *([] if choice.ensemble is None else choice.ensemble.lines()),
        *_elsewhere(choice),
        "",
        f"{'member':<52}{_column(choice.by):>9}{'to best':>10}{'± ':>9}"
        + "".join(f"  {other.name:>9}" for other in choice.also),
    ]
    shown = list(choice.ranking[:8])
    shown += [c for c in choice.ranking[8:] if c.member.deterministic or c is chosen]
    lines += [_line(choice, c, "*" if c is chosen else " ") for c in shown]
    if choice.pilot:
        lines += ["", "Multipliers of the pilot only, and how far from the best of the pilot:"]
        lines += [_line(choice, candidate) for candidate in choice.pilot]
    if any(candidate.at_edge for candidate in shown):
        lines += [
            "",
            "The best T may lie beyond an edge: evaluate with temperatures=(low, high).",
        ]
    if choice.recurrence:
        lines += ["", "How often these examples, resampled, have as their best:"]
        for member, tuned, share in choice.recurrence[:4]:
            name = choice.label(member).replace(f", T = {member.temperature:.4g}", "")
            lines.append(f"  {100 * share:4.0f} %  {name}, T {'fitted' if tuned else '= 1'}")
    if choice.agreement is not None:
        lines.append(
            "Two disjoint halves of the examples have the same best in "
            f"{100 * choice.agreement:.0f} % of divisions."
        )
    lines += _notes(choice)
    if choice.left_off:
        lines += [
            "",
            "Random behaviour of training that no member has: " + "; ".join(choice.left_off) + ".",
        ]
    return "\n".join(map(one_line, lines))  # names of splits, models and modules are not ours


def _elsewhere(choice: Choice) -> list[str]:
    """What the choice does on other data, and a warning where that is worse."""
    lines = []
    for other in choice.also:
        text = f"On {other.name}: gain of {_shown(other.gain, choice.unit)}"
        if other.worse:
            text += f"; worse than {_baseline(choice)} there by more than two standard errors"
        lines.append(text + ".")
    return lines


def _line(choice: Choice, candidate: Candidate, mark: str = " ") -> str:
    """A candidate as a line of the table."""
    edge = "  T at the edge of its bracket" if candidate.at_edge else ""
    elsewhere = "".join(
        f"  {_number(there):>{max(9, len(other.name))}}"
        for other, there in zip(choice.also, candidate.also)
    )
    return (
        f"{mark} {choice.label(candidate.member):<50}{candidate.xe:>9.4f}"
        f"{candidate.difference.value:>10.4f}{_number(candidate.difference.error)}"
        f"{elsewhere}{edge}"
    )


def _notes(choice: Choice) -> list[str]:
    """What to know of a predictor with another number of samples than were evaluated."""
    k, evaluated = choice.num_samples, choice.request.plan.num_samples
    if choice.member.deterministic:
        return []
    if choice.optimistic:
        return [
            "",
            f"{k} samples are fewer than were evaluated and may cost more than this says; to "
            f"know, evaluate with num_samples={k}.",
        ]
    if k > evaluated:
        return [
            "",
            f"{k} samples are more than the {evaluated} that were evaluated: what they gain is "
            f"extrapolated as 1/K; to know, evaluate with num_samples={k}.",
        ]
    return []


def _shown(gain: Estimate, unit: str) -> str:
    """A gain and its error, if the data show one."""
    if math.isnan(gain.error):
        return f"{gain.value:.4f} {unit}, of unknown error,"
    return f"{gain.value:.4f} ± {gain.error:.4f} {unit}"


def _column(by: str) -> str:
    """The head of the column of a criterion, where lower is better."""
    return {"xe": "XE", "brier": "Brier", "accuracy": "wrong", "ece": "ECE"}.get(by, by)


def _number(error: float) -> str:
    return f"{'unknown':>9}" if math.isnan(error) else f"{error:>9.4f}"
