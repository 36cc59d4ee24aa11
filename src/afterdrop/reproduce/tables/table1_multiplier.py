"""Table 1: cross entropy on training data as the multiplier of the dropout rates falls to 0."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from afterdrop.evaluation import Scores
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import Member
from afterdrop.reproduce.tables import published
from afterdrop.reproduce.tables.paper_table import (
    PaperTable,
    TableLine,
    TableRow,
    errors_of,
    values_of,
)
from afterdrop.reproduce.tables.published_lines import published_lines, size_note
from afterdrop.reproduce.tables.table_input import TableInput

CLEAR = 2.0  # standard errors above which a difference counts as clear


def multiplier_table(sources: Sequence[TableInput]) -> PaperTable:
    """Training XE of every alpha at each multiplier that was evaluated."""
    usable = [s for s in sources if "train" in s.scores]
    multipliers = sorted({m for s in usable for m in s.scores["train"].protocol.grid.multipliers})
    table = PaperTable(
        1,
        "Training XE (nats) by multiplier of the dropout rates, T = 1",
        [f"×{m:g}" for m in multipliers],
    )
    for source in sources:
        if not source.has("train", table):
            continue
        for alpha in source.scores["train"].protocol.grid.alphas:
            table.rows.append(_row(source, alpha, multipliers, table))
        table.note(_verdict(source))
        table.note(source.protocol_note("train"))
        size_note(source, 1, table)
    if any(s.scores["train"].request.limit is not None for s in usable):
        table.note('"First N targets" means that only the beginning of the training data was used.')
    return table


def _row(source: TableInput, alpha: float, multipliers: list[float], table: PaperTable) -> TableRow:
    members = [Member(alpha, m) for m in multipliers]
    found = [source.xe("train", member, table) for member in members]
    rises: list[Estimate | None] = [None]
    for (below, one), (above, two) in itertools.pairwise(zip(members, found)):
        known = one is not None and two is not None
        rises.append(source.scores["train"].difference(above, below) if known else None)
    printed = [published.value(1, source.data, "train", m) if alpha == 0 else None for m in members]
    lines = [
        TableLine("ours", values_of(found), best=True),
        TableLine("±", errors_of(found)),
        TableLine("− left column", values_of(rises), 5, signed=True),
        TableLine("± (paired)", errors_of(rises), 5),
        *published_lines(printed, values_of(found), table),
    ]
    return TableRow(f"{source.label('train')}; alpha = {alpha:g}", lines)


def _verdict(source: TableInput) -> str:
    """How many increases of the multiplier worsen the fit; the paper claims that all do."""
    scores = source.scores["train"]
    steps = clear = falls = 0
    for alpha in scores.protocol.grid.alphas:
        for value, error in _steps(scores, alpha):
            steps += 1
            clear += value > CLEAR * error
            falls += value < -CLEAR * error
    return (
        f"{source.name}: of {steps} steps to the next higher multiplier, {clear} clearly raise the "
        f"training XE and {falls} clearly lower it (by more than {CLEAR:g} standard errors)."
    )


def _steps(scores: Scores, alpha: float) -> list[tuple[float, float]]:
    members = [Member(alpha, m) for m in scores.protocol.grid.multipliers]
    found = [scores.difference(above, below) for below, above in itertools.pairwise(members)]
    return [(step.value, step.error) for step in found]
