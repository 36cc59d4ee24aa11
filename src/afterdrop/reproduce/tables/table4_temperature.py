"""Table 4: validation and test results at T = 1 and at the optimal T.

The temperature of each member is fitted on validation data and applied to the test data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from afterdrop.family.estimates import Estimate
from afterdrop.family.member import DET, Member, Temper
from afterdrop.family.presentation import presentation
from afterdrop.reproduce.tables import published
from afterdrop.reproduce.tables.paper_table import PaperTable, TableLine, TableRow, name_member
from afterdrop.reproduce.tables.published_lines import published_lines, size_note
from afterdrop.reproduce.tables.table_input import TableInput

SPLITS = ("valid", "test")


def temperature_table(sources: Sequence[TableInput]) -> PaperTable:
    """DET and the nine members in the paper, at T = 1 and at the optimal validation temperature."""
    columns = published.members("nine")
    table = PaperTable(
        4,
        "Validation and test results at T = 1 and at the optimal T (perplexity for words, bits for "
        "characters, otherwise XE in nats)",
        [name_member(member) for member in columns],
    )
    for source in sources:
        if not source.has("valid", table):
            continue
        tempers = _tempers(source, table)
        fits = {temper: _fits(source, columns, temper, table) for temper in tempers}
        for split in SPLITS:
            if source.has(split, table):
                table.rows.append(_row(source, split, columns, None, columns, table))
                for temper in tempers:
                    table.rows.append(_row(source, split, columns, temper, fits[temper], table))
        table.note(_share_note(source, columns))
        table.note(source.protocol_note("valid"))
        size_note(source, 4, table)
    if any(source.data in ("ptb", "wikitext-2") for source in sources):
        table.note(published.note(4))
    return table


def _tempers(source: TableInput, table: PaperTable) -> list[Temper]:
    """Where temperature can act with these Scores: on the mean, or also elsewhere."""
    if source.scores["valid"].has("tempered"):
        return ["mean", source.scores["valid"].protocol.grid.temper]
    if source.scores["valid"].protocol.grid.stochastic:
        table.miss(
            f"{source.name}: temperatures that act on each sample; make them with: "
            f"{source.command('valid', more=' --temper sample --overwrite')}, and likewise for test"
        )
    return ["mean"]


def _fits(
    source: TableInput, columns: Sequence[Member], temper: Temper, table: PaperTable
) -> list[Member | None]:
    """Each member at its optimal temperature on validation data."""
    scores, fits = source.scores["valid"], list[Member | None]()
    evaluated = _plain(scores.members)
    for member in columns:
        if member not in evaluated or not math.isfinite(scores.xe(member).value):
            fits.append(None)
            continue
        fit = scores.fit(dataclasses.replace(member, temper=temper))
        fits.append(fit.member)
        if fit.at_edge:
            table.note(
                f"{source.name}: T = {fit.member.temperature:.3f} of {name_member(member)} is at "
                "the end of its range; the optimum lies outside."
            )
    return fits


def _row(
    source: TableInput,
    split: str,
    columns: Sequence[Member],
    temper: Temper | None,
    members: Sequence[Member | None],
    table: PaperTable,
) -> TableRow:
    """One split at T = 1 (`temper` None) or at the fitted temperatures."""
    unit = presentation(source.unit)
    scores = source.scores[split]
    tempered = scores.has("tempered") and scores.protocol.grid.temper == temper
    if temper not in (None, "mean") and not tempered:
        again = source.command(split, more=f" --temper {temper} --overwrite")
        table.miss(
            f"{source.name}: temperatures on each {temper} of {split}; make them with: {again}"
        )
        members = [m if m is not None and m.temper == "mean" else None for m in members]
    found: list[Estimate | None] = [
        None if m is None else source.xe(split, m, table) for m in members
    ]
    values = [unit.value(f) for f in found]
    lines = [
        TableLine("ours", values, unit.digits, best=True),
        TableLine("±", [unit.error(f) for f in found], unit.digits),
    ]
    if temper is not None:
        lines.append(TableLine("T", [None if m is None else m.temperature for m in members], 3))
    tuned = temper is not None
    printed = [published.value(4, source.data, split, m, tuned=tuned) for m in columns]
    lines += published_lines(printed, values, table, show=unit.show, digits=unit.digits)
    at = "T = 1" if temper is None else f"optimal T on the {temper}"
    return TableRow(f"{source.label(split)}; {unit.name}, {at}", lines)


def _share_note(source: TableInput, columns: Sequence[Member]) -> str:
    """How much of the best gain at T = 1 DET gets from temperature alone."""
    scores = source.scores["valid"]
    known = [m for m in columns[1:] if m in _plain(scores.members)]
    gains = {m: scores.difference(DET, m) for m in known}
    gains = {m: g for m, g in gains.items() if math.isfinite(g.value)}
    if not gains:
        return ""
    best = max(gains, key=lambda m: gains[m].value)
    fitted = scores.fit(DET).member
    alone = scores.difference(DET, fitted)
    text = (
        f"{source.name}, valid: T = {fitted.temperature:.3f} alone improves DET by "
        f"{alone.value:.4f} ± {alone.error:.4f} nats; the best of the nine at T = 1, "
        f"{name_member(best)}, improves it by {gains[best].value:.4f} ± {gains[best].error:.4f}"
    )
    if gains[best].value > 2 * gains[best].error:
        text += f": temperature alone gives {100 * alone.value / gains[best].value:.0f} % of this"
    return text + "."


def _plain(members: Sequence[Member]) -> set[Member]:
    return {dataclasses.replace(member, temper="mean") for member in members}
