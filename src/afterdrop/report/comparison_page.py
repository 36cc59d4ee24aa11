"""The page that compares several runs: a table, paired differences, and overlaid curves."""

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
from afterdrop.report.page_elements import Page, PageTable, Picture, Section
from afterdrop.report.prose import number, signed, split_name, verdict, with_error
from afterdrop.report.report_input import ReportInput
from afterdrop.report.result_section import member_label
from afterdrop.report.run_outcome import Outcome, find_outcome
from afterdrop.report.run_page import make_sections, render


@dataclass(frozen=True)
class Entry:
    """A run, its name on the page, and its outcome if it has one."""

    name: str
    run: ReportInput
    outcome: Outcome | None


def write_comparison(runs: list[ReportInput], path: Path) -> Page:
    """Writes the page that compares runs, replacing the file atomically, and returns it.

    Raises:
        DataError: If there are fewer than two runs.
    """
    if len(runs) < 2:
        raise DataError(
            f"{len(runs)} run given; compare needs two or more (afterdrop report describes one)"
        )
    entries = [
        Entry(name, run, find_outcome(run, checks=False)) for name, run in zip(_names(runs), runs)
    ]
    scored = [(e.name, e.outcome) for e in entries if e.outcome is not None]
    makers: list[Callable[[], Section]] = [lambda: _table_section(entries)]
    if scored:
        makers += [lambda: _pairs_section(scored), lambda: _curves_section(scored)]
    makers += [lambda: _frequency_section(entries), lambda: _training_section(entries)]
    with styled():
        sections = make_sections(makers)
    page = Page(
        f"{len(runs)} runs compared",
        "comparison of runs",
        _headline(scored),
        [],
        [],
        sections,
        [f"{e.name}: {line}" for e in entries for line in e.run.missing],
    )
    write_atomic(path, render(page).encode())
    return page


def _names(runs: list[ReportInput]) -> list[str]:
    """The names of the folders if they are distinct, otherwise their paths."""
    short_names = [run.name for run in runs]
    return short_names if len(set(short_names)) == len(runs) else [str(run.path) for run in runs]


def _same_data(scored: list[tuple[str, Outcome]]) -> bool:
    first = scored[0][1].scores
    return all(
        torch.equal(first.targets, o.scores.targets)
        and torch.equal(first.clusters, o.scores.clusters)
        for _, o in scored
    )


def _headline(scored: list[tuple[str, Outcome]]) -> str:
    if not scored:
        return "None of these runs has been evaluated yet."
    if len(scored) > 1 and _same_data(scored):
        name, best = min(scored, key=lambda pair: pair[1].scores.xe(pair[1].member).value)
        return (
            f"{name} is the best run on {split_name(best.scores.split)} data: cross entropy "
            f"{with_error(best.scores.xe(best.member))} nats with {member_label(best.member)}."
        )
    gains = [(o.gain.value, name) for name, o in scored]
    value, name = max(gains)
    return (
        f"The runs were evaluated on different data, so only their gains over deterministic "
        f"evaluation can be compared: {name} has the largest, {number(value)} nats."
    )


def _table_section(entries: list[Entry]) -> Section:
    head = (
        "run",
        "chosen",
        "XE det., T = 1",
        "XE det., optimal T",
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
    text = (
        "Cross entropies (XE) are in nats; lower is better. Deterministic evaluation (det.) is "
        "with dropout switched off. The gain is that of the chosen member over deterministic "
        "evaluation at temperature 1, with one standard error. It is measured on the data used for "
        "selection, which makes it optimistic; the test gain is not affected."
    )
    table = PageTable("Overview", head, rows, left=frozenset({0, 1}))
    return Section("runs", "The runs", [text], tables=[table])


def _pairs_section(scored: list[tuple[str, Outcome]]) -> Section:
    """Paired differences to the best run, for runs evaluated on the same targets."""
    if len(scored) < 2 or not _same_data(scored):
        return Section("pairs", "Differences to the best run")
    ordered = sorted(scored, key=lambda pair: pair[1].scores.xe(pair[1].member).value)
    best_name, best = ordered[0]
    rows = []
    for name, outcome in ordered[1:]:
        found = _difference(outcome, best)
        shown = f"{signed(found.value)} ± {number(found.error)}"
        rows.append((name, shown, verdict(found, "difference", "difference")))
    head = ("run", f"XE minus XE of {best_name}", "significance")
    return Section(
        "pairs",
        "Differences to the best run",
        ["All runs were evaluated on the same targets, so their differences are paired by target."],
        tables=[
            PageTable("Chosen members, paired differences", head, rows, left=frozenset({0, 2}))
        ],
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
            "Cross entropy of the chosen members against temperature",
            "Each curve is the chosen member of a run minus deterministic evaluation of the same "
            "run at temperature 1; below zero is a gain. The marker is the optimal temperature.",
        ),
        picture(
            figures.reliability_diagram(scores, members, labels=names),
            "reliability",
            "Reliability of the chosen members",
            "On the diagonal, confidence equals accuracy. A model below it is overconfident, a "
            "model above it underconfident.",
        ),
        picture(
            figures.risk_coverage_curves(scores, members, labels=names),
            "risk",
            "Risk against coverage",
            "The error rate when only the most confident predictions are kept (left: few, right: "
            "all). Lower is better.",
        ),
    ]
    return Section("curves", "Overlaid curves", pictures=pictures + _tightness(scored))


def _tightness(scored: list[tuple[str, Outcome]]) -> list[Picture]:
    """The Jensen gaps of the runs that have one; empty if none has."""
    grids = [(name, o.scores, o.scores.protocol.grid) for name, o in scored]
    known = [(name, s) for name, s, grid in grids if grid.stochastic and max(grid.alphas) > 0]
    if not known:
        return []
    how = (
        "At lower dropout rates (to the left) predictions vary less and the bound is tighter. The "
        "shaded bands are the theoretical limits of the gap."
    )
    ax = figures.tightness([s for _, s in known], labels=[name for name, _ in known])
    return [picture(ax, "tightness", "How tight the bounds are", how)]


def _frequency_section(entries: list[Entry]) -> Section:
    """Gains by class frequency, for the runs with the same classes as the first one."""
    known = [
        (e, e.run.classes, e.outcome)
        for e in entries
        if e.run.classes is not None and e.outcome is not None
    ]
    section = Section("frequency", "Where the gains come from")
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
        "Above zero is better than deterministic evaluation of the same run. Classes that are rare "
        "in the training data are on the left. Bars are one standard error."
    )
    section.pictures.append(picture(ax, "frequency", "Gain by training frequency", how))
    return section


def _training_section(entries: list[Entry]) -> Section:
    curves = {e.name: e.run.metrics for e in entries if len(e.run.metrics) > 1}
    section = Section("training", "Training curves")
    if curves:
        ax = figures.validation_curves(curves)
        how = (
            "Deterministic evaluation on validation data during training. Heights are comparable "
            "only between runs on the same data."
        )
        section.pictures.append(picture(ax, "training", "Validation during training", how))
    return section
