"""The command line: one file per verb, which parses, calls the library and prints."""

import difflib
import os
import sys
from collections.abc import Callable, Sequence

import tyro

import afterdrop
from afterdrop.cli.check import check
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

VERBS: dict[str, Callable[..., int | None]] = {
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
    "check": check,
    "data": data,
}

_FLAGS = (tyro.conf.FlagCreatePairsOff,)  # --quiet, without --no-quiet

_ABOUT = """Train once with dropout, choose the model afterwards.

usage: afterdrop VERB ...

Your own model and data, by import path:
  sites     MODEL DATA            list the dropout sites of the model
  check     MODEL DATA            test whether its dropout is controlled correctly
  evaluate  MODEL DATA --out RUN  score every member of the dropout family
  select    RUN                   choose the best member, with error bars

The paper's models, on its data or your own text:
  train     RECIPE --out RUN      train a model with a recipe
  tune      RECIPE --study STUDY  search a recipe's hyperparameters
  evaluate  RUN                   score every member on the run's validation data
  select    RUN                   choose the best member, with error bars
  test      RUN                   evaluate the chosen member on test data
  score     RUN FILE              print the log-probability of a text under it
  sample    RUN                   draw a text from it
  data      list | fetch NAME     list or download data sets

Pages and tables:
  report    RUN                   write a page about a run: RUN/report.html
  compare   RUN RUN...            compare several runs on one page
  reproduce RUN...                print the paper's tables next to the published figures

"afterdrop VERB --help" explains a verb, with examples; "afterdrop --version" prints the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the exit status.

    0 is success, 1 a check that failed, 2 bad input, 130 an interruption (SIGINT) and 141 a closed
    output pipe.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in ([], ["-h"], ["--help"]):
        print(_ABOUT)
        return 0 if given else 2
    if given[0] == "--version":
        print(f"afterdrop {afterdrop.__version__}")
        return 0
    verb, *rest = given
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1) or list(VERBS)
        print(f"afterdrop: there is no verb {verb!r}; try {', '.join(near)}", file=sys.stderr)
        return 2
    try:
        # One parser per verb: with subcommands, tyro would print the full help of every verb.
        status = tyro.cli(VERBS[verb], prog=f"afterdrop {verb}", args=rest, config=_FLAGS)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except StoppedElsewhere:  # rank 0 prints the reason
        return 2
    except AfterdropError as error:
        name = f"afterdrop rank {os.environ['RANK']}" if launched() else "afterdrop"
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if speaks():
            print(
                "\nafterdrop: interrupted; finished work is kept, run the same command to resume",
                file=sys.stderr,
            )
        return 130
    return status or 0
