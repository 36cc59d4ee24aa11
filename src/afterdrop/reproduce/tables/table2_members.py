"""Table 2: validation cross entropy over alpha and multiplier, at T = 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

from afterdrop.evaluation import Scores
from afterdrop.family.member import DET, Member
from afterdrop.reproduce.tables import published
from afterdrop.reproduce.tables.paper_table import (
    PaperTable,
    TableLine,
    TableRow,
    errors_of,
    name_member,
    values_of,
)
from afterdrop.reproduce.tables.published_lines import published_lines, size_note
from afterdrop.reproduce.tables.seed_means import by_seed, error_over, mean_over
from afterdrop.reproduce.tables.table_input import TableInput

SPLIT = "valid"


def members_table(sources: Sequence[TableInput]) -> PaperTable:
    """Validation XE of DET, the nine members in the paper, and the best of the whole grid."""
    columns = published.members("nine")
    table = PaperTable(
        2,
        "Validation XE (nats) over alpha and multiplier, T = 1",
        [*map(name_member, columns), "best of grid"],
    )
    for group in by_seed(sources):
        usable = [source for source in group if source.has(SPLIT, table)]
        for source in usable:
            table.rows.append(_row(source, columns, table))
            table.note(_best_note(source))
            table.note(source.protocol_note(SPLIT))
            size_note(source, 2, table)
        limits = {source.scores[SPLIT].request.limit for source in usable}
        if len(usable) > 1 and len(limits) == 1:
            table.rows.append(_mean_row(usable, columns, table))
    if any(source.data == "ptb-char" for source in sources):
        table.note("The paper has character-level results for enwik8 but not for PTB.")
    return table


def best_of_grid(scores: Scores) -> Member:
    """The member with the lowest XE at T = 1 among all that were evaluated."""
    values = {member: scores.xe(member).value for member in scores.members}
    finite = {member: value for member, value in values.items() if math.isfinite(value)}
    return min(finite, key=finite.__getitem__, default=DET)


def _row(source: TableInput, columns: tuple[Member, ...], table: PaperTable) -> TableRow:
    scores = source.scores[SPLIT]
    members = [*columns, best_of_grid(scores)]
    found = [source.xe(SPLIT, member, table) for member in members]
    paired = [
        None if f is None else scores.difference(member, DET) for f, member in zip(found, members)
    ]
    lines = [
        TableLine("ours", values_of(found), best=True),
        TableLine("±", errors_of(found)),
        TableLine("ours − DET", values_of(paired), signed=True),
        TableLine("± (paired)", errors_of(paired)),
    ]
    values = [published.value(2, source.data, SPLIT, member) for member in columns]
    printed = published_lines([*values, None], lines[0].values, table)
    det = values[0]
    if printed and det is not None:
        gaps = [None if f is None else f.meant - det.meant for f in (*values, None)]
        printed.insert(1, TableLine("paper − DET", gaps, 3, signed=True))
    return TableRow(source.label(SPLIT), [*lines, *printed])


def _mean_row(
    sources: list[TableInput], columns: tuple[Member, ...], table: PaperTable
) -> TableRow:
    """Means over seeds, with errors from their spread."""

    def all_of(member: Member) -> list[float | None]:
        return values_of([source.xe(SPLIT, member, table) for source in sources])

    values = [all_of(member) for member in columns]
    gaps = [
        [None if a is None or b is None else a - b for a, b in zip(column, values[0])]
        for column in values
    ]
    lines = [
        TableLine("mean", [*map(mean_over, values), None], best=True),
        TableLine("± (seeds)", [*map(error_over, values), None]),
        TableLine("mean − DET", [*map(mean_over, gaps), None], signed=True),
        TableLine("± (seeds)", [*map(error_over, gaps), None]),
    ]
    names = ", ".join(source.name for source in sources)
    return TableRow(f"mean over {len(sources)} seeds ({names})", lines)


def _best_note(source: TableInput) -> str:
    scores = source.scores[SPLIT]
    best = best_of_grid(scores)
    if best.deterministic:
        return f"{source.name}: DET is the best of all {len(scores.members)} members of the grid."
    gap = scores.difference(best, DET)
    return (
        f"{source.name}: the best of all {len(scores.members)} members of the grid is "
        f"{name_member(best)}, {gap.value:+.4f} ± {gap.error:.4f} nats relative to DET "
        "(optimistic, because it was selected on these data)."
    )
