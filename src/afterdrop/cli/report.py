"""afterdrop report: one page about a run."""

from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from afterdrop.cli.options import OptionalPath
from afterdrop.errors import FileError
from afterdrop.report.prose import certainty, headline
from afterdrop.report.run import is_study, read_run
from afterdrop.runs.folder import scores_path


def report(
    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")],
    /,
    out: OptionalPath = None,
    split: str = "valid",
    classes: OptionalPath = None,
    data: OptionalPath = None,
) -> None:
    """Write one self-contained HTML page about a run, for people who never read the paper.

    The page leads with what was chosen, what it gained over deterministic evaluation and how
    certain that is. Then come the maps and curves, each with how to read it, the training curves,
    the protocol and the commands that repeat it all. It needs no network, works on a phone, in
    dark mode and on paper, and says what is missing in the run and how to make it.

    For example (open runs/ptb/report.html in a browser; the second is for your own model, the
    third the page of a study):
      afterdrop report runs/ptb
      afterdrop report runs/mine --classes classes.json
      afterdrop report studies/ptb

    Args:
        run: The folder of a run, or of scores of your own model, or of a study of afterdrop tune.
        out: Where the page goes; RUN/report.html or STUDY/study.html by default.
        split: The scores that members are chosen on.
        classes: JSON object from class name to training count, in the order of the classes, such
            as {"cat": 5000, "dog": 120}; a run of afterdrop train finds them in its data.
        data: The folder of the named data sets, if not the one of training.
    """
    from afterdrop.report.page import write_report  # needs matplotlib

    if is_study(run):
        from afterdrop.report.study import write_study  # needs matplotlib
        from afterdrop.tune.result import read_result  # needs optuna

        print(f"Wrote {write_study(read_result(run), run, out)}.")
        return
    if split != "valid" and not scores_path(run, split).exists():  # or the page would be empty
        raise FileError(f"{run} has no scores of the split {split!r}")
    found = read_run(run, split, classes, data)
    path = run / "report.html" if out is None else out
    outcome = write_report(found, path)
    print(f"Wrote {path}.")
    if outcome is not None:
        print(headline(outcome, found.unit))
        print("\n".join(certainty(outcome)[:2]))
    for line in found.missing:
        print(f"Missing: {line}.")
