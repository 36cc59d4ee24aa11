"""The command line: one file per verb, which parses, calls the library and prints."""

import contextlib
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tyro

import afterdrop
from afterdrop.cli.check import check
from afterdrop.cli.compare import compare
from afterdrop.cli.completion import print_completion
from afterdrop.cli.data import data
from afterdrop.cli.doctor import doctor
from afterdrop.cli.dynamic import dynamic
from afterdrop.cli.evaluate import evaluate
from afterdrop.cli.options import checked
from afterdrop.cli.output_streams import drop_output, output_failed, watched_streams
from afterdrop.cli.predict import predict
from afterdrop.cli.report import report
from afterdrop.cli.reproduce import reproduce
from afterdrop.cli.resolve import is_of_user_code
from afterdrop.cli.sample import sample
from afterdrop.cli.score import score
from afterdrop.cli.select import select
from afterdrop.cli.sites import sites
from afterdrop.cli.test import test
from afterdrop.cli.torchrun import end_rank, launched, speaks
from afterdrop.cli.train import train
from afterdrop.cli.tune import tune
from afterdrop.errors import AfterdropError, StoppedElsewhere
from afterdrop.evaluation.chunks import out_of_memory
from afterdrop.interrupted_import import end_quiet_imports
from afterdrop.plain_text import one_line
from afterdrop.stop_request import StopSignal, end_at_next_signal, signals_raise

VERBS: dict[str, Callable[..., int | None]] = {
    "train": train,
    "tune": tune,
    "evaluate": evaluate,
    "select": select,
    "test": test,
    "dynamic": dynamic,
    "predict": predict,
    "report": report,
    "compare": compare,
    "score": score,
    "sample": sample,
    "reproduce": reproduce,
    "sites": sites,
    "check": check,
    "data": data,
    "doctor": doctor,
}

_FLAGS = (tyro.conf.FlagCreatePairsOff,)  # --quiet, without --no-quiet

_ABOUT = """Train once with dropout, choose the model afterwards.

usage: afterdrop VERB ...

Your own model and data, by import path:
  sites     MODEL DATA            list the dropout sites of the model
  check     MODEL DATA            test whether its dropout is controlled correctly
  evaluate  MODEL DATA --out RUN  score every member of the dropout family
  evaluate  --samples FILE ...    the same for stored predictions, as of an ensemble
  select    RUN                   choose the best member, with error bars
  predict   MODEL DATA --out FILE predict each example, with its uncertainty

The paper's models, on its data or your own text:
  train     RECIPE --out RUN      train a model with a recipe
  tune      RECIPE --study STUDY  search a recipe's hyperparameters
  evaluate  RUN                   score every member on the run's validation data
  select    RUN                   choose the best member, with error bars
  test      RUN                   evaluate the chosen member on test data
  dynamic   RUN                   let the weights learn from the text that they predict
  score     RUN FILE              print the log-probability of a text under it
  sample    RUN                   draw a text from it
  data      list | fetch NAME     list or download data sets

Pages and tables:
  report    RUN                   write a page about a run: RUN/report.html
  compare   RUN RUN...            compare several runs on one page
  reproduce RUN...                print the paper's tables next to the published figures

This installation:
  doctor                          print versions, devices, kernels and extras
  --version                       print the version
  --completion bash | zsh         print a completion script, as for source <(...)

"afterdrop VERB --help" explains a verb, with examples."""


_STOPS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "the terminal was closed"}

_ABOUT_ITSELF: dict[str, Callable[[list[str]], None]] = {
    "-h": lambda _: print(_ABOUT),
    "--help": lambda _: print(_ABOUT),
    "--version": lambda _: print(f"afterdrop {afterdrop.__version__}"),
    "--completion": lambda rest: print_completion(VERBS, rest),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the exit status.

    0 is success, 1 a check or a job that failed, 2 bad input, 129 a closed terminal (SIGHUP), 130
    an interruption (SIGINT), 141 a closed output pipe and 143 a termination (SIGTERM).
    """
    end_quiet_imports()  # first: this is also what a second Ctrl-C does
    before, warnings.formatwarning = warnings.formatwarning, _one_line_warning
    try:
        with watched_streams(last=arguments is None), signals_raise(StopSignal):
            try:
                status = _run(arguments)
            except KeyboardInterrupt as error:
                status = _stopped(error)
    finally:
        warnings.formatwarning = before
    if arguments is None:  # the process ends now, which takes torch a third of a second
        end_at_next_signal(status)
    return end_rank(status)


def _one_line_warning(message: Warning | str, *place: Any, **line: Any) -> str:
    """A warning without the place in the code, which says nothing to users of the command line."""
    return f"warning: {one_line(message)}\n"


def _run(arguments: Sequence[str] | None) -> int:
    if callable(reconfigure := getattr(sys.stdout, "reconfigure", None)):
        reconfigure(errors="backslashreplace")  # names of files need not be Unicode
    given = list(sys.argv[1:] if arguments is None else arguments)
    verb, *rest = given or ["--help"]
    if verb not in (*VERBS, *_ABOUT_ITSELF):
        near = difflib.get_close_matches(verb, VERBS, n=1) or list(VERBS)
        print(f"afterdrop: there is no verb {verb!r:.60}; try {', '.join(near)}", file=sys.stderr)
        return 2
    try:
        if verb in _ABOUT_ITSELF:
            _ABOUT_ITSELF[verb](rest)
            sys.stdout.flush()
            return 0 if given else 2
        # One parser per verb: with subcommands, tyro would print the full help of every verb.
        status = tyro.cli(checked(VERBS[verb]), prog=f"afterdrop {verb}", args=rest, config=_FLAGS)
        sys.stdout.flush()
    except StoppedElsewhere:  # rank 0 prints the reason
        return 2
    except (AfterdropError, OSError) as error:  # OSError: a path that cannot be used, a full disk
        of_user = not isinstance(error, AfterdropError) and is_of_user_code(error)
        if isinstance(error, BrokenPipeError) and output_failed():
            drop_output()
            return 141
        if of_user:
            raise
        name = f"afterdrop rank {os.environ['RANK']}" if launched() else "afterdrop"
        no_output = not isinstance(error, AfterdropError) and output_failed()
        what = "cannot write to the standard output: " if no_output else ""
        print(f"{name}: {what}{one_line(error)}", file=sys.stderr)
        if no_output:
            drop_output()
        return 2
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        why = one_line(str(error).splitlines()[0] if str(error) else "no memory is left")
        print(f"afterdrop: out of memory: {why:.200}; give smaller sizes", file=sys.stderr)
        return 2
    return status or 0


def _stopped(error: KeyboardInterrupt) -> int:
    """Says what a signal has stopped and what is kept; returns the exit status."""
    stop = error if isinstance(error, StopSignal) else StopSignal("SIGINT")
    if speaks():
        said = "; ".join([_STOPS[stop.name], *getattr(error, "__notes__", ())])
        with contextlib.suppress(OSError):  # of a closed terminal
            print(f"\nafterdrop: {one_line(said)}", file=sys.stderr)
    return stop.status
