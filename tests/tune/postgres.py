"""A real PostgreSQL server for tests, from the system's packages."""

import contextlib
import glob
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def find_binary(name: str) -> str | None:
    """The path of a server program; distributions do not put them on the PATH."""
    return shutil.which(name) or next(iter(glob.glob(f"/usr/lib/postgresql/*/bin/{name}")), None)


def why_not() -> str | None:
    """Why no server can be started here, or None."""
    missing = [name for name in ("initdb", "postgres") if find_binary(name) is None]
    if missing:
        return f"PostgreSQL is not installed ({', '.join(missing)}): apt-get install postgresql"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed: pip install 'afterdrop[postgres]'"
    return None


class Server:
    """A server on a socket of its own, which can be stopped and started again.

    Args:
        folder: An empty folder, for its data and its socket.
    """

    def __init__(self, folder: Path) -> None:
        self.url = f"postgresql://afterdrop@/postgres?host={folder}"
        self._folder = folder
        self._options: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL}
        if os.getuid() == 0:  # the server refuses to run as root
            entry = pwd.getpwnam("nobody")
            os.chown(folder, entry.pw_uid, entry.pw_gid)
            self._options |= {"user": entry.pw_uid, "group": entry.pw_gid}
        subprocess.run(
            [find_binary("initdb"), "-D", "data", "-A", "trust", "-U", "afterdrop", "--no-sync"],
            check=True,
            **self._options,
        )
        self.start()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        command = [find_binary("postgres"), "-D", "data", "-k", str(self._folder), "-F"]
        self._process = subprocess.Popen(
            [*command, "-c", "listen_addresses="], stderr=subprocess.DEVNULL, **self._options
        )
        _wait(self.url, self._process)

    def stop(self) -> None:
        """Ends it and its connections."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=30)


@contextlib.contextmanager
def server() -> Iterator[Server]:
    """Starts a server, and ends it."""
    folder = Path(tempfile.mkdtemp(prefix="afterdrop-pg-"))
    try:
        started = Server(folder)
        try:
            yield started
        finally:
            started.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(url: str, process: subprocess.Popen) -> None:
    import psycopg

    for _ in range(300):
        assert process.poll() is None, "the server ended"
        try:
            psycopg.connect(url).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")
