"""The command line: one file a verb, each parses, calls the library and prints."""

import sys
from collections.abc import Callable, Sequence

import tyro

from afterdrop.cli.evaluate import evaluate
from afterdrop.cli.select import select
from afterdrop.cli.sites import sites
from afterdrop.errors import AfterdropError

VERBS: dict[str, Callable[..., None]] = {"evaluate": evaluate, "select": select, "sites": sites}

_ABOUT = """Train once with dropout, choose the model afterwards.

  afterdrop sites    MODEL DATA            what is random in a model
  afterdrop evaluate MODEL DATA --out RUN  scores of every member of the dropout family
  afterdrop select   RUN                   the best member, and how sure that is
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb; returns the exit status (0 done, 2 bad input, 130 interrupted)."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS, prog="afterdrop", description=_ABOUT, args=arguments
        )
    except AfterdropError as error:
        print(f"afterdrop: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nafterdrop: interrupted; finished work is kept, run the same command to go on",
            file=sys.stderr,
        )
        return 130
    return 0
