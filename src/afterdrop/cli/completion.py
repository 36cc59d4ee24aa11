"""afterdrop --completion SHELL: a script that completes verbs and options."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

from afterdrop.errors import AfterdropError

SHELLS = ("bash", "zsh")


def print_completion(verbs: Mapping[str, Callable[..., Any]], given: Sequence[str]) -> None:
    """Prints a completion script for a shell, to be sourced or saved where the shell looks.

    Args:
        verbs: The functions of the verbs, by name.
        given: The arguments after --completion: the name of the shell.
    """
    if len(given) != 1 or given[0] not in SHELLS:
        raise AfterdropError(
            f"--completion got {' '.join(given) or 'nothing'}: name one shell, "
            f"{' or '.join(SHELLS)}, as in: source <(afterdrop --completion bash)"
        )
    try:
        tyro.extras.subcommand_cli_from_dict(
            dict(verbs), prog="afterdrop", args=["--tyro-print-completion", given[0]]
        )
    except SystemExit as finished:  # tyro ends the process after printing
        if finished.code:
            raise
