"""afterdrop compare: compare several runs on one page."""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalPath
from afterdrop.plain_text import one_line
from afterdrop.report.report_input import read_input


def compare(
    runs: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN RUN...")],
    /,
    out: Path = Path("compare.html"),
    split: str = "valid",
    data: OptionalPath = None,
) -> None:
    """Write one self-contained HTML page that compares runs.

    The page has a table with deterministic evaluation, its best temperature, the chosen member and
    the test results of every run, followed by the curves of all runs in common figures. Runs that
    were scored on the same targets are also compared by paired differences with errors.

    For example:
      afterdrop compare runs/ptb runs/ptb-retuned
      afterdrop compare runs/* --out all.html

    Args:
        runs: Two or more run folders.
        out: File to write.
        split: Split on whose scores members are chosen.
        data: Folder of the named data sets, if it has moved since training.
    """
    from afterdrop.report.comparison_page import write_comparison  # needs matplotlib

    page = write_comparison([read_input(run, split, None, data) for run in runs], out)
    print(f"Wrote {one_line(out)}.")
    print(one_line(page.headline))
    for line in page.missing:
        print(f"Missing: {one_line(line)}.")
