"""afterdrop compare: several runs on one page."""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalPath
from afterdrop.report.run import read_run


def compare(
    runs: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN RUN...")],
    /,
    out: Path = Path("compare.html"),
    split: str = "valid",
    data: OptionalPath = None,
) -> None:
    """Write one self-contained HTML page that compares runs.

    A table of deterministic evaluation, its best temperature, the chosen member and test results
    of every run, then overlaid curves. Runs scored on the same data are also compared target by
    target, which says which differences are more than chance.

    For example:
      afterdrop compare runs/ptb runs/ptb-retuned
      afterdrop compare runs/* --out all.html

    Args:
        runs: Two run folders or more.
        out: Where the page goes.
        split: The scores that members are chosen on.
        data: The folder of the named data sets, if not the one of training.
    """
    from afterdrop.report.compare import write_comparison  # needs matplotlib

    page = write_comparison([read_run(run, split, None, data) for run in runs], out)
    print(f"Wrote {out}.")
    print(page.headline)
    for line in page.missing:
        print(f"Missing: {line}.")
