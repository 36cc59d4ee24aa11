"""The main result: highlighted numbers, the members compared, and the ranking."""

import math

from afterdrop.evaluation import Scores
from afterdrop.evaluation.ensemble import Ensemble
from afterdrop.family.member import DET, Member
from afterdrop.family.presentation import perplexity, presentation
from afterdrop.report.page_elements import Card, PageTable, Section
from afterdrop.report.prose import describe, loss_label, number, signed, split_name, with_error
from afterdrop.report.run_outcome import Outcome
from afterdrop.selection import Choice
from afterdrop.selection.candidate import Candidate
from afterdrop.selection.ensemble_gain import ensemble_gain

_SHOWN = 8  # candidates listed in the ranking


def cards(outcome: Outcome, unit: str) -> list[Card]:
    """The highlighted numbers, on the data that the gain is measured on."""
    scores = outcome.test or outcome.scores
    found, source = outcome.evidence
    before, after = scores.xe(DET).value, scores.xe(outcome.member).at(outcome.num_samples)
    split = f"nats per {unit}, {split_name(scores.split)}"
    plain = "Deterministic evaluation" if outcome.ensemble is None else "Best member alone"
    shown = [
        Card("Gain", signed(found.value), f"± {number(found.error)} nats, {source}"),
        Card(plain, number(before), split),
        Card("Chosen member", number(after), split),
    ]
    if unit == "word":
        ratio = f"{perplexity(before):.2f} → {perplexity(after):.2f}"
        shown.append(Card("Perplexity", ratio, f"{split_name(scores.split)}; lower is better"))
    elif not scores.protocol.has_classes:
        ranked = " → ".join(number(scores.crps(m).value) for m in (DET, outcome.member))
        shown.append(Card("CRPS", ranked, f"{split_name(scores.split)}; lower is better"))
    else:
        right = [100 * scores.accuracy(m).value for m in (DET, outcome.member)]
        shown.append(
            Card("Accuracy", f"{right[0]:.2f} → {right[1]:.2f} %", split_name(scores.split))
        )
    return shown


def shown_members(outcome: Outcome) -> dict[str, Member]:
    """The members that tables and curves compare, by label.

    The deterministic member at its optimal temperature comes last: figures over all temperatures
    merge it with the first, and the others keep their colours.
    """
    usual = Member(1.0, 1.0, temper=outcome.scores.protocol.grid.temper)
    sampled = [] if outcome.member.deterministic else [outcome.member]
    if usual in outcome.scores.members and math.isfinite(outcome.scores.xe(usual).value):
        sampled.append(usual)
    plain = [outcome.member] if outcome.member.deterministic else []
    names = {usual: "plain mean, T = 1" if outcome.ensemble else "MC dropout (α = 1, ×1), T = 1"}
    if not outcome.member.unchanged:
        names[outcome.member] = f"chosen: {_label(outcome, outcome.member)}"
    members = dict.fromkeys([DET, *sampled, *plain, outcome.tempered])
    return {names.get(member, _label(outcome, member)): member for member in members}


def _label(outcome: Outcome, member: Member) -> str:
    """A label of a member of masks, or of an ensemble."""
    return outcome.ensemble.label(member) if outcome.ensemble else member_label(member)


def member_label(member: Member) -> str:
    """A short label of a member.

    Example:
        >>> member_label(Member(0.5, 0.8, 1.02))
        'α = 0.5, ×0.8, T = 1.02'
        >>> member_label(DET), member_label(DET.at_temperature(1.0003))
        ('deterministic, T = 1', 'deterministic, T = 1.0003')
    """
    temperature = f"{member.temperature:.3g}"
    if temperature == "1":  # show that it is not exactly 1
        temperature = f"{member.temperature:.7g}"
    tail = f"T = {temperature}"
    if member.deterministic:
        return f"deterministic, {tail}"
    return f"α = {member.alpha:g}, ×{member.multiplier:g}, {tail}"


def summary_section(outcome: Outcome, unit: str) -> Section:
    """Cross entropy, accuracy and calibration of the members compared, and the ranking."""
    members = shown_members(outcome)
    section = Section("chosen", "The chosen member")
    what = "masks" if outcome.ensemble is None else "samples"
    loss = (
        "Cross entropy (XE) is the mean of −log p(correct answer) in nats; lower is better, and a "
        "decrease of 0.01 makes the correct answer 1 % more probable."
    )
    if not outcome.scores.protocol.has_classes:
        loss = (
            "The negative log-likelihood (NLL) is the mean of −log p(target) in nats, where p is a "
            "density; lower is better, and it may be negative."
        )
    section.paragraphs.append(
        "Predictions are made with "
        f"{describe(outcome.member, outcome.num_samples, outcome.ensemble)}. {loss} ± is one "
        f"standard error, which accounts for both the {what} and the data."
    )
    section.tables.append(_summary(outcome.scores, members, outcome.member, unit))
    if outcome.ensemble is not None:
        found = ensemble_gain(outcome.scores, outcome.ensemble, outcome.member)
        section.paragraphs += found.lines()
        section.tables.append(_members_table(outcome.scores, outcome.ensemble))
    if outcome.choice is not None:
        section.paragraphs += _criterion(outcome.choice)
        if outcome.choice.also:
            section.tables.append(_elsewhere_table(outcome.choice))
    if outcome.test is not None:
        held = set(outcome.test.members)
        usable = {k: m for k, m in members.items() if m.at_temperature(1.0) in held}
        section.tables.append(_summary(outcome.test, usable, outcome.member, unit))
    if outcome.selection is not None:
        section.tables.append(_ranking_table(outcome, outcome.selection))
        if outcome.selection.pilot:
            section.tables.append(_pilot_table(outcome.scores, outcome.selection.pilot))
        if outcome.selection.recurrence:
            section.tables.append(_recurrence_table(outcome, outcome.selection))
    return section


def _criterion(choice: Choice) -> list[str]:
    """What was chosen by, if not by cross entropy."""
    if choice.by == "xe":
        return []
    return [f"The member was chosen by {choice.by}, where lower is better. {choice.headline()}"]


def _members_table(scores: Scores, ensemble: Ensemble) -> PageTable:
    pairs = zip(ensemble.names, ensemble.single_xe)
    rows = [(name, number(xe)) for name, xe in pairs]
    marked = frozenset({ensemble.best})
    return PageTable("Each member alone, T = 1", ("member", loss_label(scores)), rows, marked)


def _elsewhere_table(choice: Choice) -> PageTable:
    """What the choice does on other data."""
    rows = [
        (
            other.name,
            with_error(other.gain),
            "worse by more than two standard errors" if other.worse else "not worse",
        )
        for other in choice.also
    ]
    head = ("data", f"gain ({choice.unit})", "than deterministic at T = 1")
    return PageTable("The choice on other data", head, rows, left=frozenset({0, 2}))


def _summary(scores: Scores, members: dict[str, Member], chosen: Member, unit: str) -> PageTable:
    head = ["member", loss_label(scores), "± error", *scores.metrics]
    shown = presentation(unit)
    head += [] if shown.name == "XE" else [shown.name]
    rows = []
    ordered = sorted(members.items(), key=lambda item: item[1] == chosen)  # the chosen member last
    for name, member in ordered:
        xe = scores.xe(member)
        row = [name, number(xe.value), number(xe.error)]
        row += [number(metric(member).value) for metric in scores.metrics.values()]
        if shown.name != "XE":
            row.append(number(shown.show(xe.value), shown.digits))
        rows.append(tuple(row))
    marked = frozenset(i for i, (_, member) in enumerate(ordered) if member == chosen)
    rows += _quantile_rows(scores)
    return PageTable(
        f"{split_name(scores.split).capitalize()} data ({scores.num_targets:,} targets)",
        tuple(head),
        rows,
        marked,
    )


def _quantile_rows(scores: Scores) -> list[tuple[str, ...]]:
    """Means of quantiles, which are not members of the family, at the multiplier that is best."""
    if not scores.has("quantile", "nll_at"):
        return []
    averaged = {m: scores.quantile_average(m) for m in scores.protocol.grid.stochastic}
    fitted = {m: (s, s.fit(DET).member) for m, s in averaged.items()}
    best = min(fitted, key=lambda m: fitted[m][0].xe(fitted[m][1]).value)
    found, member = fitted[best]
    xe = found.xe(member)
    values = [number(metric(member).value) for metric in found.metrics.values()]
    label = f"quantile averaging, ×{best:g}, T = {member.temperature:.3g}"
    return [(label, number(xe.value), number(xe.error), *values)]


def _ranking_table(outcome: Outcome, selection: Choice) -> PageTable:
    ranking = list(enumerate(selection.ranking, 1))
    shown = ranking[:_SHOWN]
    wanted = (DET, outcome.tempered, outcome.member)
    shown += [(place, c) for place, c in ranking[_SHOWN:] if c.member in wanted]
    others = () if outcome.choice is None else outcome.choice.also
    saved = {} if outcome.choice is None else {c.member: c.also for c in outcome.choice.ranking}
    unknown = (math.nan,) * len(others)
    rows = [
        (
            str(place),
            _label(outcome, c.member) + (" (T at the end of its range)" if c.at_edge else ""),
            number(c.xe),
            with_error(c.difference) if place > 1 else "—",
            *(number(there) for there in saved.get(c.member, unknown)),
        )
        for place, c in shown
    ]
    marked = frozenset(i for i, (_, c) in enumerate(shown) if c.member == outcome.member)
    return PageTable(
        f"Best of {len(ranking)} candidates on {split_name(outcome.scores.split)} data",
        (
            "rank",
            "member",
            loss_label(outcome.scores),
            "difference to the best",
            *(o.name for o in others),
        ),
        rows,
        marked,
        left=frozenset({0, 1}),
    )


def _pilot_table(scores: Scores, pilot: tuple[Candidate, ...]) -> PageTable:
    assert scores.pilot is not None
    rows = [(member_label(c.member), number(c.xe), with_error(c.difference)) for c in pilot]
    return PageTable(
        f"Multipliers that only the pilot evaluated ({scores.pilot.num_targets:,} targets, "
        f"{scores.pilot.num_samples} samples)",
        ("member", loss_label(scores), "difference to the best of the pilot"),
        rows,
        left=frozenset({0}),
    )


def _recurrence_table(outcome: Outcome, selection: Choice) -> PageTable:
    rows = [
        (
            f"{100 * share:.0f} %",
            f"{_label(outcome, m).rsplit(', T', 1)[0]}, T {'fitted' if t else '= 1'}",
        )
        for m, t, share in selection.recurrence[:5]
    ]
    head = ("share", "member")
    return PageTable("Members chosen on resampled examples", head, rows, left=frozenset({0, 1}))
