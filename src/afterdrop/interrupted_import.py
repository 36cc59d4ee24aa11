"""Ctrl-C while the command line is still importing torch: one line instead of a traceback.

Importing takes a second or more, and only then can `main` catch an interrupt. This module is the
first that the package imports. It does nothing unless the process is the command `afterdrop` or
`python -m afterdrop`.
"""

import os
import signal
import sys
import threading
from types import FrameType


def is_command(arguments: list[str], original: list[str]) -> bool:
    """Whether a process is the command line, from `sys.argv` and `sys.orig_argv`.

    Example:
        >>> is_command(["-m", "report"], ["python", "-m", "afterdrop", "report"])
        True
        >>> is_command(["/usr/bin/afterdrop"], ["python", "/usr/bin/afterdrop"])
        True
        >>> is_command(["train.py"], ["python", "train.py"])
        False
    """
    if arguments[:1] == ["-m"]:  # so it is while `python -m` imports the package
        place = original.index("-m") + 1 if "-m" in original else len(original)
        return original[place : place + 1] == ["afterdrop"]
    name = os.path.basename(arguments[0]) if arguments else ""
    return name.partition(".")[0] == "afterdrop"


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nafterdrop: interrupted before it started\n")
    os._exit(130)


def end_quiet_imports() -> None:
    """Makes Ctrl-C a `KeyboardInterrupt` again, once everything is imported."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if (
    threading.current_thread() is threading.main_thread()
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    and is_command(getattr(sys, "argv", []), sys.orig_argv)
):
    signal.signal(signal.SIGINT, _stop)
