"""Child processes that share the imports of this one."""

import os
import signal
import sys
from collections.abc import Callable


def forked(action: Callable[[], object]) -> int:
    """Runs an action in a child process; returns its process number."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except SystemExit as end:
            os._exit(int(end.code or 0))
        except KeyboardInterrupt:  # before the command line handles signals, or after
            os._exit(128 + signal.SIGINT)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    """The status of a process once it has ended: negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
