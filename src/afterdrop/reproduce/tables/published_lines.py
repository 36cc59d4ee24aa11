"""Table lines with the published values and the differences to ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from afterdrop.reproduce.tables import published
from afterdrop.reproduce.tables.paper_table import PaperTable, TableLine
from afterdrop.reproduce.tables.published import PublishedValue
from afterdrop.reproduce.tables.table_input import TableInput

MISPRINT = "†"


def published_lines(
    values: Sequence[PublishedValue | None],
    ours: Sequence[float | None],
    table: PaperTable,
    *,
    show: Callable[[float], float] = lambda xe: xe,
    digits: int = 4,
) -> list[TableLine]:
    """The published values and our differences to them; no lines if nothing was published.

    Args:
        values: One per column; None where nothing was published.
        ours: Our values in the unit of the table.
        table: The table, which gets a note for each misprint.
        show: Converts nats to the unit of the table.
        digits: Decimals of the differences; published values are shown with at most three.
    """
    if not any(values):
        return []
    for value in values:
        if value is not None and value.misprint:
            against = (
                "" if value.meant == value.xe else f"; differences are taken to {value.meant:g}"
            )
            table.note(f"{MISPRINT} misprint: {value.misprint}{against}.")
    printed = [None if f is None else show(f.xe) for f in values]
    marks = [MISPRINT if f is not None and f.misprint else "" for f in values]
    differences = [
        None if f is None or mine is None else mine - show(f.meant) for f, mine in zip(values, ours)
    ]
    return [
        TableLine("paper", printed, min(digits, 3), marks=marks),
        TableLine("ours − paper", differences, digits, signed=True),
    ]


def size_note(source: TableInput, number: int, table: PaperTable) -> None:
    """Adds a note if the published values for this data set are for models of another size."""
    sizes = published.parameters(number, source.data)
    mine = source.parameters
    if not sizes or mine is None or any(published.same_size(mine, size) for size in sizes):
        return
    theirs = " and ".join(f"{size / 1e6:g}M" for size in sizes)
    table.note(
        f"{source.name} has {mine / 1e6:.1f}M weights and the paper's model {theirs}: differences "
        "to its values reflect the size of the model; compare the signs within a row instead."
    )
