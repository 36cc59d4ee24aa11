"""The command line: one file a verb, each parses, calls the library and prints."""

import os
import sys
from collections.abc import Callable, Sequence

import tyro

from afterdrop.cli.compare import compare
from afterdrop.cli.data import data
from afterdrop.cli.evaluate import evaluate
from afterdrop.cli.report import report
from afterdrop.cli.reproduce import reproduce
from afterdrop.cli.sample import sample
from afterdrop.cli.score import score
from afterdrop.cli.select import select
from afterdrop.cli.sites import sites
from afterdrop.cli.test import test
from afterdrop.cli.torchrun import launched, speaks
from afterdrop.cli.train import train
from afterdrop.cli.tune import tune
from afterdrop.errors import AfterdropError, StoppedElsewhere

VERBS: dict[str, Callable[..., None]] = {
    "train": train,
    "tune": tune,
    "evaluate": evaluate,
    "select": select,
    "test": test,
    "report": report,
    "compare": compare,
    "score": score,
    "sample": sample,
    "reproduce": reproduce,
    "sites": sites,
    "data": data,
}

_ABOUT = """Train once with dropout, choose the model afterwards.

  afterdrop sites    MODEL DATA            what is random in your own model
  afterdrop evaluate MODEL DATA --out RUN  scores of every member of the dropout family
  afterdrop select   RUN                   the best member, and how sure that is
  afterdrop report   RUN                   one page about it: RUN/report.html
  afterdrop compare  RUN RUN...            several runs on one page

  afterdrop train    RECIPE --out RUN      train a model of the paper, or on your own text
  afterdrop tune     RECIPE --study STUDY  search its hyperparameters
  afterdrop evaluate RUN                   scores of every member on its validation data
  afterdrop test     RUN                   the chosen member on test data
  afterdrop score    RUN FILE              log-probability of a text
  afterdrop sample   RUN                   text drawn from the chosen member
  afterdrop reproduce RUN ...              the paper's tables, beside the published figures
  afterdrop data     list|fetch NAME       data sets by name
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit status (0 done, 2 bad input, 130 interrupted)."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS, prog="afterdrop", description=_ABOUT, args=arguments
        )
    except StoppedElsewhere:  # rank 0 says why
        return 2
    except AfterdropError as error:
        name = f"afterdrop rank {os.environ['RANK']}" if launched() else "afterdrop"
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if speaks():
            print(
                "\nafterdrop: interrupted; finished work is kept, run the same command to go on",
                file=sys.stderr,
            )
        return 130
    return 0
