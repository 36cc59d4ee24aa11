"""afterdrop report: write a page about a run."""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalPath
from afterdrop.errors import FileError
from afterdrop.plain_text import one_line
from afterdrop.report.prose import certainty, headline
from afterdrop.report.report_input import is_study, read_input
from afterdrop.runs import Run
from afterdrop.tune.study_files import read_result


def report(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    out: OptionalPath = None,
    split: str = "valid",
    classes: OptionalPath = None,
    data: OptionalPath = None,
) -> None:
    """Write one self-contained HTML page about a run, for readers who do not know the paper.

    The page starts with the chosen member, its gain over deterministic evaluation and the error of
    that gain. Then follow maps and curves, each with an explanation, the training curves, the
    protocol and the commands that repeat the run. The page needs no network. Results that the run
    does not have yet are listed with the commands that produce them.

    For example (a trained run, a run of your own model, and a study):
      afterdrop report runs/ptb
      afterdrop report runs/mine --classes classes.json
      afterdrop report studies/ptb

    Args:
        run: A run folder, or the folder of a study of afterdrop tune.
        out: File to write; by default RUN/report.html or STUDY/study.html.
        split: Split on whose scores the member is chosen.
        classes: JSON file with an object from class name to training count, in the order of the
            classes, such as {"cat": 5000, "dog": 120}; trained runs take this from their data.
        data: Folder of the named data sets, if it has moved since training.
    """
    from afterdrop.report.run_page import write_report  # needs matplotlib

    if is_study(run):
        from afterdrop.report.study_page import write_study  # needs matplotlib

        print(f"Wrote {one_line(write_study(read_result(run), run, out))}.")
        return
    if split != "valid" and split not in Run(run).splits:  # the page would be empty
        raise FileError(f"{run} has no scores of the split {split!r}")
    found = read_input(run, split, classes, data)
    path = Run(run).layout.report if out is None else out
    outcome = write_report(found, path)
    print(f"Wrote {one_line(path)}.")
    if outcome is not None:
        for line in (headline(outcome, found.unit), *certainty(outcome)[:2]):
            print(one_line(line))
    for line in found.missing:
        print(f"Missing: {one_line(line)}.")
