"""Python code of the pages runs from top to bottom and prints what the page shows.

A block that begins with ```python is run, unless the line also says `no-run`; a ```text block right
after it is its output. Digits are not compared: they may differ in the last places between
processors.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest
from package_source import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```$)?", re.M | re.S
)


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """The code of a page, and what each block prints if the page shows it."""
    text = page.read_text(encoding="utf-8")
    return [(match["code"], match["output"]) for match in BLOCK.finditer(text)]


def without_digits(text: str) -> list[str]:
    """The lines of an output, every number as 0 and every run of spaces as one."""
    lines = [re.sub(r"\s+", " ", re.sub(r"-?\d+", "0", line)).strip() for line in text.splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem
)
def test_code_of_the_pages_runs_and_prints_what_they_show(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code, output in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), names)
        if output is not None:
            assert without_digits(printed.getvalue()) == without_digits(output), printed.getvalue()
