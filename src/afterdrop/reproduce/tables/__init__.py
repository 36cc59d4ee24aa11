"""The paper's Tables 1 to 5 from finished runs, next to the published values."""

from afterdrop.reproduce.tables.build_tables import paper_tables
from afterdrop.reproduce.tables.frequency_bands import FrequencyBand, parse_band
from afterdrop.reproduce.tables.paper_table import PaperTable, TableLine, TableRow
from afterdrop.reproduce.tables.table_writers import (
    to_csv,
    to_latex,
    to_markdown,
    to_text,
    write_tables,
)

__all__ = [
    "FrequencyBand",
    "PaperTable",
    "TableLine",
    "TableRow",
    "paper_tables",
    "parse_band",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_text",
    "write_tables",
]
