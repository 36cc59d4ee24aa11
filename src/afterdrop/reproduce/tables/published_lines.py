"""Lines that set the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afterdrop.reproduce.tables import published
from afterdrop.reproduce.tables.paper_table import PaperTable, TableLine
from afterdrop.reproduce.tables.published import PublishedValue
from afterdrop.reproduce.tables.table_input import TableInput

MISPRINT = "†"


def published_lines(
    figures: Sequence[PublishedValue | None],
    ours: Sequence[float | None],
    table: PaperTable,
    *,
    show: Callable[[float], float] = lambda xe: xe,
    digits: int = 4,
) -> list[TableLine]:
    """What the paper printed and our difference to it; no lines where it printed nothing.

    Args:
        figures: One for each column, None where nothing was printed.
        ours: In the unit of the table.
        table: Gets a note for each misprint.
        show: From nats to the unit of the table.
        digits: Decimals of the difference; printed figures are shown with three at most.
    """
    if not any(figures):
        return []
    for figure in figures:
        if figure is not None and figure.misprint:
            against = "" if figure.meant == figure.xe else f"; differences are to {figure.meant:g}"
            table.note(f"{MISPRINT} misprint: {figure.misprint}{against}.")
    printed = [None if f is None else show(f.xe) for f in figures]
    marks = [MISPRINT if f is not None and f.misprint else "" for f in figures]
    differences = [
        None if f is None or mine is None else mine - show(f.meant)
        for f, mine in zip(figures, ours)
    ]
    return [
        TableLine("paper", printed, min(digits, 3), marks=marks),
        TableLine("ours − paper", differences, digits, signed=True),
    ]


def size_note(source: TableInput, number: int, table: PaperTable) -> None:
    """Says where the paper's figures for this data are of a model of another size."""
    sizes = published.parameters(number, source.data)
    mine = source.parameters
    if not sizes or mine is None or any(published.same_size(mine, size) for size in sizes):
        return
    theirs = " and ".join(f"{size / 1e6:g}M" for size in sizes)
    table.note(
        f"{source.name} has {mine / 1e6:.1f}M weights, the paper's {theirs}: "
        "differences to its figures say nothing about the method, their signs within a row do."
    )
