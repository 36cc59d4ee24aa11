"""Tables as text, Markdown, CSV and LaTeX.

Names of runs and data sets come from outside: each form shows them on one line and escapes what
has a meaning in it, so that a name can neither forge a row nor become HTML, TeX or a formula.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path

from afterdrop.files import write_atomic
from afterdrop.plain_text import one_line
from afterdrop.reproduce.tables.paper_table import PaperTable, TableLine


def to_text(table: PaperTable) -> str:
    """A table for the terminal; `*` marks the lowest number of a line.

    Example:
        >>> from afterdrop.reproduce.tables.paper_table import TableRow
        >>> row = TableRow("one", [TableLine("ours", [1.5, 1.25], 2, best=True)])
        >>> print(to_text(PaperTable(2, "XE", ["DET", "AMC"], [row])))
        Table 2. XE
                           DET    AMC
        one
          ours            1.50  1.25*
    """
    every = [line for row in table.rows for line in row.lines]
    heads = [one_line(head) for head in table.columns]
    first = max([14, *(len(one_line(line.name)) for line in every)])
    widths = [
        2 + max([len(head), *(len(_starred(line, at)) for line in every)])
        for at, head in enumerate(heads)
    ]

    def joined(cells: Iterable[str]) -> str:
        return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))

    lines = [_title(table)]
    if table.rows:
        lines.append(" " * (first + 2) + joined(heads))
    for row in table.rows:
        lines.append(one_line(row.label))
        for line in row.lines:
            cells = joined(_starred(line, at) for at in range(len(widths)))
            lines.append(f"  {one_line(line.name):<{first}}{cells}")
    return "\n".join([*lines, *_remarks(table, "  ")])


def to_markdown(table: PaperTable) -> str:
    """A Markdown table; the lowest number of a line is bold."""
    lines = [f"## {_markdown(_title(table))}", ""]
    if table.rows:
        heads = ["", "", *map(_markdown, table.columns)]
        lines += [_pipes(heads), _pipes(["---", "---", *("---:" for _ in table.columns)])]
    for row in table.rows:
        for number, line in enumerate(row.lines):
            cells = [_emphasised(line, i, "**{}**") for i in range(len(table.columns))]
            label = _markdown(row.label) if number == 0 else ""
            lines.append(_pipes([label, _markdown(line.name), *cells]))
    remarks = [_markdown(text) for text in _remarks(table, "")]
    return (
        "\n".join([*lines, *([""] if remarks else []), *(f"- {text}" for text in remarks)]) + "\n"
    )


def to_latex(table: PaperTable) -> str:
    r"""A LaTeX `table` environment for booktabs; the lowest number of a line is bold."""
    columns = len(table.columns)
    lines = [r"\begin{table}", r"  \small\centering", rf"  \caption{{{_tex(table.title)}}}"]
    if table.rows:
        heads = " & ".join(["", *map(_tex, table.columns)])
        lines += [rf"  \begin{{tabular}}{{@{{}}l{'r' * columns}@{{}}}}", r"    \toprule"]
        lines += [rf"    {heads} \\"]
        for row in table.rows:
            lines += [
                r"    \midrule",
                rf"    \multicolumn{{{columns + 1}}}{{@{{}}l}}{{{_tex(row.label)}}} \\",
            ]
            for line in row.lines:
                cells = [_tex_number(line, i) for i in range(columns)]
                lines.append("    " + " & ".join([_tex(line.name), *cells]) + r" \\")
        lines += [r"    \bottomrule", r"  \end{tabular}"]
    lines += [rf"  \par {_tex(text)}" for text in _remarks(table, "")]
    return "\n".join([*lines, r"\end{table}"]) + "\n"


def to_csv(tables: Iterable[PaperTable]) -> str:
    """All numbers of the tables at full precision, one per line."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["table", "row", "column", "quantity", "value", "mark"])
    for table in tables:
        for row in table.rows:
            for line in row.lines:
                for at, (head, value) in enumerate(zip(table.columns, line.values, strict=True)):
                    mark = line.marks[at] if line.marks else ""
                    shown = "" if value is None else repr(value)
                    names = [_csv(text) for text in (row.label, head, line.name)]
                    writer.writerow([table.number, *names, shown, _csv(mark)])
    return file.getvalue()


def write_tables(tables: Iterable[PaperTable], out: str | Path) -> list[Path]:
    """Writes each table as .txt, .md, .csv and .tex, and all of them as tables.md.

    Returns:
        The paths of the files.

    Raises:
        FileError: If a file cannot be written.
    """
    tables, folder = list(tables), Path(out)
    forms: dict[str, Callable[[PaperTable], str]] = {
        "txt": lambda table: to_text(table) + "\n",
        "md": to_markdown,
        "csv": lambda table: to_csv([table]),
        "tex": to_latex,
    }
    contents = {
        folder / f"table{table.number}.{ending}": form(table)
        for table in tables
        for ending, form in forms.items()
    }
    contents[folder / "tables.md"] = "\n".join(to_markdown(table) for table in tables)
    for path, content in contents.items():
        write_atomic(path, content.encode())
    return list(contents)


def _title(table: PaperTable) -> str:
    return one_line(f"Table {table.number}. {table.title}")


def _remarks(table: PaperTable, indent: str) -> list[str]:
    return [
        *(f"{indent}{one_line(text)}" for text in table.notes),
        *(f"{indent}Missing: {one_line(text)}" for text in table.missing),
    ]


def _starred(line: TableLine, at: int) -> str:
    return line.text(at) + "*" * (line.lowest == at)


def _emphasised(line: TableLine, at: int, form: str) -> str:
    text = line.text(at)
    return form.format(text) if line.lowest == at else text


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


_MARKDOWN = {"&": "&amp;", "<": "&lt;", ">": "&gt;", **{c: f"\\{c}" for c in "\\|`*[]"}}


def _markdown(text: str) -> str:
    return "".join(_MARKDOWN.get(character, character) for character in one_line(text))


def _csv(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    line = one_line(text)
    return f"'{line}" if line.lstrip()[:1] in tuple("=+-@") else line


_TEX = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    "α": r"$\alpha$",
    "†": r"$^\dagger$",
    "*": "$^*$",
}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in one_line(text))


def _tex_number(line: TableLine, at: int) -> str:
    return rf"\textbf{{{_tex(line.text(at))}}}" if line.lowest == at else _tex(line.text(at))
