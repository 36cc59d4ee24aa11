"""The main result: highlighted numbers, the members compared, and the ranking."""

import math

from afterdrop.evaluation import Scores
from afterdrop.family.member import DET, Member
from afterdrop.family.presentation import presentation
from afterdrop.report.page_elements import Card, PageTable, Section
from afterdrop.report.prose import describe, number, signed, split_name, with_error
from afterdrop.report.run_outcome import Outcome
from afterdrop.selection import Choice

_SHOWN = 8  # candidates listed in the ranking


def cards(outcome: Outcome, unit: str) -> list[Card]:
    """The highlighted numbers, on the data that the gain is measured on."""
    scores = outcome.test or outcome.scores
    found, source = outcome.evidence
    before, after = scores.xe(DET).value, scores.xe(outcome.member).at(outcome.num_samples)
    split = f"nats per {unit}, {split_name(scores.split)}"
    shown = [
        Card("Gain", signed(found.value), f"± {number(found.error)} nats, {source}"),
        Card("Deterministic evaluation", number(before), split),
        Card("Chosen member", number(after), split),
    ]
    if unit == "word":
        ratio = f"{math.exp(before):.2f} → {math.exp(after):.2f}"
        shown.append(Card("Perplexity", ratio, f"{split_name(scores.split)}; lower is better"))
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
    names = {usual: "MC dropout (α = 1, ×1), T = 1"}
    if outcome.member != DET:
        names[outcome.member] = f"chosen: {member_label(outcome.member)}"
    members = dict.fromkeys([DET, *sampled, *plain, outcome.tempered])
    return {names.get(member, member_label(member)): member for member in members}


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
    section.paragraphs.append(
        f"Predictions are made with {describe(outcome.member, outcome.num_samples)}. Cross entropy "
        "(XE) is the mean of −log p(correct answer) in nats; lower is better, and a decrease of "
        "0.01 makes the correct answer 1 % more probable. ± is one standard error, which accounts "
        "for both the masks and the data."
    )
    section.tables.append(_summary(outcome.scores, members, outcome.member, unit))
    if outcome.test is not None:
        held = set(outcome.test.members)
        usable = {k: m for k, m in members.items() if m.at_temperature(1.0) in held}
        section.tables.append(_summary(outcome.test, usable, outcome.member, unit))
    if outcome.selection is not None:
        section.tables.append(_ranking_table(outcome, outcome.selection))
        if outcome.selection.recurrence:
            section.tables.append(_recurrence_table(outcome.selection))
    return section


def _summary(scores: Scores, members: dict[str, Member], chosen: Member, unit: str) -> PageTable:
    head = ["member", "XE (nats)", "± error", "accuracy", "Brier", "ECE"]
    shown = presentation(unit)
    head += [] if shown.name == "XE" else [shown.name]
    rows = []
    ordered = sorted(members.items(), key=lambda item: item[1] == chosen)  # the chosen member last
    for name, member in ordered:
        xe = scores.xe(member)
        row = [name, number(xe.value), number(xe.error)]
        row += [number(scores.accuracy(member).value), number(scores.brier(member).value)]
        row.append(number(scores.ece(member).value))
        if shown.name != "XE":
            row.append(number(shown.show(xe.value), shown.digits))
        rows.append(tuple(row))
    marked = frozenset(i for i, (_, member) in enumerate(ordered) if member == chosen)
    return PageTable(
        f"{split_name(scores.split).capitalize()} data ({scores.num_targets:,} targets)",
        tuple(head),
        rows,
        marked,
    )


def _ranking_table(outcome: Outcome, selection: Choice) -> PageTable:
    ranking = list(enumerate(selection.ranking, 1))
    shown = ranking[:_SHOWN]
    wanted = (DET, outcome.tempered, outcome.member)
    shown += [(place, c) for place, c in ranking[_SHOWN:] if c.member in wanted]
    rows = [
        (
            str(place),
            member_label(c.member) + (" (T at the end of its range)" if c.at_edge else ""),
            number(c.xe),
            with_error(c.difference) if place > 1 else "—",
        )
        for place, c in shown
    ]
    marked = frozenset(i for i, (_, c) in enumerate(shown) if c.member == outcome.member)
    return PageTable(
        f"Best of {len(ranking)} candidates on {split_name(outcome.scores.split)} data",
        ("rank", "member", "XE (nats)", "difference to the best"),
        rows,
        marked,
        left=frozenset({0, 1}),
    )


def _recurrence_table(selection: Choice) -> PageTable:
    rows = [
        (
            f"{100 * share:.0f} %",
            f"{member_label(m).rsplit(', T', 1)[0]}, T {'fitted' if t else '= 1'}",
        )
        for m, t, share in selection.recurrence[:5]
    ]
    head = ("share", "member")
    return PageTable("Members chosen on resampled examples", head, rows, left=frozenset({0, 1}))
