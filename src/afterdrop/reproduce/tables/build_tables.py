"""Builds the paper's five tables from finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from afterdrop.errors import FileError
from afterdrop.reproduce.tables.frequency_bands import FrequencyBand
from afterdrop.reproduce.tables.paper_table import PaperTable
from afterdrop.reproduce.tables.table1_multiplier import multiplier_table
from afterdrop.reproduce.tables.table2_members import members_table
from afterdrop.reproduce.tables.table3_frequency import frequency_table
from afterdrop.reproduce.tables.table4_temperature import temperature_table
from afterdrop.reproduce.tables.table5_mask_sharing import mask_sharing_table
from afterdrop.reproduce.tables.table_input import TableInput, read_table_input


def paper_tables(
    runs: Sequence[str | Path], *, bands: Sequence[FrequencyBand] = (), data: Path | None = None
) -> list[PaperTable]:
    """Tables 1 to 5 of the paper from run folders, next to the published values.

    The configuration and the Scores of a run determine which tables it appears in. Each table lists
    what is missing together with the command that produces it.

    Args:
        runs: Run folders of `afterdrop train` or `afterdrop evaluate`.
        bands: Frequency bands of Table 3; by default bands that suit each data set.
        data: The folder of the named data sets, if it differs from that of training.

    Raises:
        FileError: If none of the folders holds a run.

    Example:
        >>> paper_tables([])
        Traceback (most recent call last):
        afterdrop.errors.FileError: no run is given; pass run folders, as in afterdrop reproduce \
runs/ptb runs/mnist
    """
    sources, faults = read_sources(runs)
    tables = [
        multiplier_table(sources),
        members_table(sources),
        frequency_table(sources, bands, data),
        temperature_table(sources),
        mask_sharing_table(sources),
    ]
    for table in tables:
        for fault in faults:
            table.miss(fault)
    return tables


def read_sources(runs: Sequence[str | Path]) -> tuple[list[TableInput], list[str]]:
    """The runs that can be read, and the reasons why others cannot.

    Raises:
        FileError: If none of the folders holds a run.
    """
    if not runs:
        raise FileError(
            "no run is given; pass run folders, as in afterdrop reproduce runs/ptb runs/mnist"
        )
    sources: list[TableInput] = []
    faults: list[str] = []
    for run in runs:
        try:
            sources.append(read_table_input(run))
        except FileError as error:
            faults.append(str(error))
    if not sources:
        raise FileError("; ".join(faults))
    return sources, faults
