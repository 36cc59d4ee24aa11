"""Tables as files: golden output, escaping, and full precision in the CSV."""

import csv
import io
import math

import pytest

from afterdrop.errors import FileError
from afterdrop.reproduce.tables.paper_table import PaperTable, TableLine, TableRow
from afterdrop.reproduce.tables.table_writers import (
    to_csv,
    to_latex,
    to_markdown,
    to_text,
    write_tables,
)

TABLE = PaperTable(
    2,
    "XE & more",
    ["DET", "AMC ×1"],
    [
        TableRow(
            "my_run | 50% <b>x</b>",
            [
                TableLine("ours", [1.0 / 3, 0.25], best=True),
                TableLine("ours − paper", [-0.01, None], 3, signed=True),
                TableLine("paper", [math.nan, 0.92], 2, marks=["", "†"]),
            ],
        )
    ],
    ["a note"],
    ["test Scores; make them with: afterdrop evaluate RUN --split test"],
)


def test_text():
    assert to_text(TABLE).splitlines() == [
        "Table 2. XE & more",
        "                     DET   AMC ×1",
        "my_run | 50% <b>x</b>",
        "  ours            0.3333  0.2500*",
        "  ours − paper    −0.010        –",
        "  paper              NaN    0.92†",
        "  a note",
        "  Missing: test Scores; make them with: afterdrop evaluate RUN --split test",
    ]


def test_markdown_escapes_pipes_and_highlights_the_lowest():
    lines = to_markdown(TABLE).splitlines()
    assert lines[4] == "| my_run \\| 50% &lt;b&gt;x&lt;/b&gt; | ours | 0.3333 | **0.2500** |"
    assert all(line.replace("\\|", "").count("|") == 5 for line in lines[2:7])


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@sum", " =1", "\t=1"])
def test_no_cell_of_the_csv_is_a_formula(name):
    table = PaperTable(2, name, [name], [TableRow(name, [TableLine(name, [-0.5])])])
    (row,) = csv.DictReader(io.StringIO(to_csv([table])))
    for field in ("row", "column", "quantity"):
        assert row[field][0] in "'\\"  # an apostrophe marks a text, and a tab is escaped
    assert float(row["value"]) == -0.5


def test_a_name_is_one_line_of_plain_text_in_every_form():
    name = "a\nb | <script>x</script> \x1b[31m \u202e [x](y) `z` $1$ \\input{x}"
    table = PaperTable(2, name, [name], [TableRow(name, [TableLine(name, [1.0])])], [name], [name])
    harmless = PaperTable(2, "n", ["n"], [TableRow("n", [TableLine("n", [1.0])])], ["n"], ["n"])
    for form in (to_text, to_markdown, to_latex, lambda table: to_csv([table])):
        text = form(table)
        assert text.count("\n") == form(harmless).count("\n")
        assert "\x1b" not in text and "\u202e" not in text
    assert "<script>" not in to_markdown(table) and "[x](y)" not in to_markdown(table)
    assert r"\input{" not in to_latex(table) and to_latex(table).count("$") % 2 == 0


def test_latex_escapes_special_characters():
    text = to_latex(TABLE)
    assert r"my\_run | 50\% $<$b$>$x$<$/b$>$" in text and r"XE \& more" in text
    assert r"\textbf{0.2500}" in text and r"0.92$^\dagger$" in text
    assert text.count(r"\begin{") == text.count(r"\end{") == 2
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert text.count("$") % 2 == 0


def test_csv_keeps_every_number_exactly():
    rows = list(csv.DictReader(io.StringIO(to_csv([TABLE]))))
    assert len(rows) == 6
    assert float(rows[0]["value"]) == 1.0 / 3 and rows[0]["row"] == "my_run | 50% <b>x</b>"
    assert rows[3]["value"] == "" and math.isnan(float(rows[4]["value"]))
    assert rows[5]["mark"] == "†"


def test_a_table_without_rows_says_what_is_missing_in_every_form():
    empty = PaperTable(5, "nothing", ["a"], missing=["two runs"])
    for form in (to_text, to_markdown, to_latex):
        assert "Missing: two runs" in form(empty)
    assert len(to_csv([empty]).splitlines()) == 1


def test_all_forms_are_written(tmp_path):
    files = write_tables([TABLE], tmp_path / "new")
    names = ["table2.txt", "table2.md", "table2.csv", "table2.tex", "tables.md"]
    assert [path.name for path in files] == names
    assert all(path.read_text("utf-8") for path in files)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"):
        write_tables([TABLE], tmp_path / "file" / "out")
