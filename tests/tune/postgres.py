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


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Starts a server on a socket of its own, gives its URL, and ends it."""
    folder = Path(tempfile.mkdtemp(prefix="afterdrop-pg-"))
    user: dict[str, int] = {}
    if os.getuid() == 0:  # the server refuses to run as root
        entry = pwd.getpwnam("nobody")
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        user = {"user": entry.pw_uid, "group": entry.pw_gid}
    options = {"cwd": folder, "stdout": subprocess.DEVNULL, **user}
    try:
        subprocess.run(
            [find_binary("initdb"), "-D", "data", "-A", "trust", "-U", "afterdrop", "--no-sync"],
            check=True,
            **options,
        )
        command = [find_binary("postgres"), "-D", "data", "-k", str(folder), "-F"]
        process = subprocess.Popen(
            [*command, "-c", "listen_addresses="], stderr=subprocess.DEVNULL, **options
        )
        try:
            url = f"postgresql://afterdrop@/postgres?host={folder}"
            _wait(url, process)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
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
