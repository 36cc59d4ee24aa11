"""Several runs on one page: a table of what each gives, and overlaid curves."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from afterdrop.errors import DataError
from afterdrop.family.estimates import Estimate, estimate
from afterdrop.family.member import DET
from afterdrop.files import write_atomic
from afterdrop.report import figures
from afterdrop.report.figure_sections import picture
from afterdrop.report.figure_style import styled
from afterdrop.report.page_elements import Page, PageTable, Section
from afterdrop.report.prose import number, signed, verdict, with_error
from afterdrop.report.result_section import member_label
from afterdrop.report.run import Run
from afterdrop.report.run_outcome import Outcome, find_outcome
from afterdrop.report.run_page import made, render


@dataclass(frozen=True)
class Entry:
    """A run under the name that the page calls it, with its outcome if it has one."""

    name: str
    run: Run
    outcome: Outcome | None


def write_comparison(runs: list[Run], path: Path) -> Page:
    """Writes the page that compares runs, atomically, and returns it.

    Raises:
        DataError: If there are fewer than two runs.
    """
    if len(runs) < 2:
        raise DataError(f"{len(runs)} run to compare; give two or more, or use afterdrop report")
    entries = [
        Entry(name, run, find_outcome(run, checks=False)) for name, run in zip(_names(runs), runs)
    ]
    scored = [(e.name, e.outcome) for e in entries if e.outcome is not None]
    makers: list[Callable[[], Section]] = [lambda: _table_section(entries)]
    if scored:
        makers += [lambda: _pairs_section(scored), lambda: _curves_section(scored)]
    makers += [lambda: _frequency_section(entries), lambda: _training_section(entries)]
    with styled():
        sections = made(makers)
    page = Page(
        f"{len(runs)} runs compared",
        "one page about several runs",
        _headline(scored),
        [],
        [],
        sections,
        [f"{e.name}: {line}" for e in entries for line in e.run.missing],
    )
    write_atomic(path, render(page).encode())
    return page


def _names(runs: list[Run]) -> list[str]:
    """The folders' own names where they differ, else their paths."""
    short_names = [run.name for run in runs]
    return short_names if len(set(short_names)) == len(runs) else [str(run.path) for run in runs]


def _same_data(scored: list[tuple[str, Outcome]]) -> bool:
    first = scored[0][1].scores
    return all(
        torch.equal(first.tensors["targets"], o.scores.tensors["targets"])
        and torch.equal(first.clusters, o.scores.clusters)
        for _, o in scored
    )


def _headline(scored: list[tuple[str, Outcome]]) -> str:
    if not scored:
        return "None of these runs has a result yet."
    if len(scored) > 1 and _same_data(scored):
        name, best = min(scored, key=lambda pair: pair[1].scores.xe(pair[1].member).value)
        return (
            f"{name} is the best of them on {best.scores.split} data: cross entropy "
            f"{with_error(best.scores.xe(best.member))} nats with {member_label(best.member)}."
        )
    gains = [(o.gain.value, name) for name, o in scored]
    value, name = max(gains)
    return (
        f"The runs were scored on different data, so only their gains over ordinary evaluation can "
        f"be compared: {name} gains most, {number(value)} nats."
    )


def _table_section(entries: list[Entry]) -> Section:
    head = (
        "run",
        "chosen",
        "XE det., T = 1",
        "XE det., best T",
        "XE chosen",
        "gain",
        "test XE det.",
        "test XE chosen",
        "test gain",
    )
    rows = []
    for entry in entries:
        o = entry.outcome
        if o is None:
            rows.append((entry.name, *["—"] * (len(head) - 1)))
            continue
        xe = [number(o.scores.xe(m).value) for m in (DET, o.tempered, o.member)]
        on_test = ["—"] * 3
        if o.test is not None and o.test_gain is not None:
            on_test = [number(o.test.xe(m).value) for m in (DET, o.member)]
            on_test.append(with_error(o.test_gain))
        rows.append((entry.name, member_label(o.member), *xe, with_error(o.gain), *on_test))
    words = (
        "Cross entropies (XE) are in nats, lower is better; det. is deterministic, which is "
        "ordinary evaluation. The gain is that of the chosen member over it at temperature 1, "
        "with one standard error, on the data that chose; the test gain is the honest one."
    )
    table = PageTable("Every run at a glance", head, rows, left=frozenset({0, 1}))
    return Section("runs", "The runs", [words], tables=[table])


def _pairs_section(scored: list[tuple[str, Outcome]]) -> Section:
    """Chosen members of runs on the same data, target by target against the best."""
    if len(scored) < 2 or not _same_data(scored):
        return Section("pairs", "Against the best run")
    ordered = sorted(scored, key=lambda pair: pair[1].scores.xe(pair[1].member).value)
    best_name, best = ordered[0]
    rows = []
    for name, outcome in ordered[1:]:
        found = _difference(outcome, best)
        shown = f"{signed(found.value)} ± {number(found.error)}"
        rows.append((name, shown, verdict(found, "difference", "difference")))
    head = ("run", f"XE minus that of {best_name}", "how certain")
    return Section(
        "pairs",
        "Against the best run",
        ["All runs were scored on the same targets, so differences are taken target by target."],
        tables=[PageTable("Chosen members, paired", head, rows, left=frozenset({0, 2}))],
    )


def _difference(one: Outcome, other: Outcome) -> Estimate:
    values = one.scores.values(one.member).minus(other.scores.values(other.member))
    shared = one.scores.protocol.shared or other.scores.protocol.shared
    return estimate(values, one.scores.clusters, shared=shared)


def _curves_section(scored: list[tuple[str, Outcome]]) -> Section:
    names = [name for name, _ in scored]
    scores = [outcome.scores for _, outcome in scored]
    members = [outcome.member for _, outcome in scored]
    plain = [member.at_temperature(1.0) for member in members]
    pictures = [
        picture(
            figures.temperature_curves(scores, plain, labels=names),
            "temperature",
            "Chosen members against temperature",
            "Each curve is a run's chosen member less that run's own ordinary evaluation at "
            "temperature 1; below zero is a gain. The marker is its best temperature.",
        ),
        picture(
            figures.reliability_diagram(scores, members, labels=names),
            "reliability",
            "Reliability of the chosen members",
            "On the diagonal, confidence is what it says. Below it a model is too sure, above it "
            "too modest.",
        ),
        picture(
            figures.risk_coverage_curves(scores, members, labels=names),
            "risk",
            "Risk against coverage",
            "If only the most confident predictions are kept (left), fewer of them are wrong. "
            "A lower curve is better.",
        ),
    ]
    deep = [
        (n, s)
        for n, s in zip(names, scores)
        if s.protocol.grid.stochastic and max(s.protocol.grid.alphas) > 0
    ]
    if deep:
        pictures.append(
            picture(
                figures.tightness([s for _, s in deep], labels=[n for n, _ in deep]),
                "tightness",
                "How tight the bounds are",
                "As dropout rates fall (to the left), predictions vary less and the bound gets "
                "tighter. The bands are where theory says the gap must lie.",
            )
        )
    return Section("curves", "Overlaid curves", pictures=pictures)


def _frequency_section(entries: list[Entry]) -> Section:
    """Gains by frequency, of the runs whose classes are those of the first that has any."""
    known = [
        (e, e.run.classes, e.outcome)
        for e in entries
        if e.run.classes is not None and e.outcome is not None
    ]
    section = Section("frequency", "Where the gains are")
    if not known:
        return section
    counts = known[0][1].counts
    alike = [(e.name, o) for e, c, o in known if torch.equal(c.counts, counts)]
    if len(alike) < 2:
        return section
    ax = figures.gain_by_frequency(
        [o.scores for _, o in alike],
        [o.member for _, o in alike],
        counts,
        labels=[name for name, _ in alike],
    )
    how = (
        "Above zero is better than that run's ordinary evaluation; left are classes that training "
        "rarely saw. Bars are one standard error."
    )
    section.pictures.append(picture(ax, "frequency", "Gain by training frequency", how))
    return section


def _training_section(entries: list[Entry]) -> Section:
    curves = {e.name: e.run.metrics for e in entries if len(e.run.metrics) > 1}
    section = Section("training", "Training curves")
    if curves:
        ax = figures.validation_curves(curves)
        how = (
            "Ordinary evaluation on validation data while training. Only runs on the same data can "
            "be compared in height."
        )
        section.pictures.append(picture(ax, "training", "Validation while training", how))
    return section
