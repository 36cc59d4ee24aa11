"""The files of a training run (`config.json`, `metrics.jsonl`, `checkpoint/`) and their lock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from afterdrop.errors import FileError
from afterdrop.files import read_json, write_atomic, write_json
from afterdrop.run_layout import RunLayout
from afterdrop.train.checks import TrainError
from afterdrop.train.config import TrainConfig, differences

Resume = Literal["auto", "require", "refuse"]
RESUMES: tuple[Resume, ...] = ("auto", "require", "refuse")
_KIND, _VERSION = "afterdrop-run", 2


class RunFolder(RunLayout):
    """A run folder as training writes it."""

    def write_config(self, config: TrainConfig, facts: Mapping[str, Any]) -> None:
        """Writes the configuration and facts such as the sizes of the model."""
        write_json(self.config, _KIND, _VERSION, {"config": config.to_dict(), **facts})

    def read_config(self) -> tuple[TrainConfig, dict[str, Any]]:
        """The configuration and the facts.

        Raises:
            FileError: If this is not a run folder.
        """
        content = read_json(self.config, _KIND, _VERSION)
        return TrainConfig.from_dict(content.pop("config")), content

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Appends one line and waits until it is on the disk.

        Raises:
            FileError: If it cannot be written; resuming removes an incomplete line.
        """
        try:
            with open(self.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(f"cannot write {self.metrics}: {error}") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines; an incomplete last line, left by a crash, is omitted.

        Raises:
            FileError: If a line is not JSON, or was written by an older afterdrop.
        """
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text(encoding="utf-8").split("\n")
        try:
            found = [json.loads(line) for line in lines[:-1]]
        except ValueError as error:
            raise FileError(
                f"{self.metrics} has a line that is not JSON ({error}); it was edited by hand. "
                "Repair it, or move it away to continue without the old lines."
            ) from error
        if any("interval" not in line for line in found):
            raise FileError(
                f"{self.metrics} has lines without 'interval': another version of afterdrop wrote "
                "them. Train again in a new folder, or install the matching afterdrop."
            )
        return found

    def trim_metrics(self, interval: int) -> None:
        """Removes lines that a killed run wrote after the checkpoint of validation `interval`."""
        kept = [line for line in self.read_metrics() if line["interval"] <= interval]
        content = "".join(json.dumps(line) + "\n" for line in kept).encode()
        if self.metrics.exists() and self.metrics.read_bytes() != content:
            write_atomic(self.metrics, content)

    def check(self, config: TrainConfig, resume: Resume) -> bool:
        """Whether the folder holds a run of this configuration; refuses any other content.

        Raises:
            TrainError: If it holds another run or other files, or not what `resume` asks for.
        """
        if not self.config.exists():
            if resume == "require":
                raise TrainError(
                    f"resume is 'require' and {self.path} does not hold a run; "
                    "check the path, or start one with resume='auto'"
                )
            visible = [p.name for p in self.path.iterdir() if not p.name.startswith(".")]
            if visible:
                raise TrainError(
                    f"{self.path} holds other files ({', '.join(sorted(visible)[:3])}), not a run; "
                    "give a new or empty folder"
                )
            return False
        if resume == "refuse":
            raise TrainError(
                f"resume is 'refuse' and {self.path} already holds a run; "
                "give a new folder, or resume='auto' to continue it"
            )
        differing = differences(self.read_config()[0], config)
        if differing:
            raise TrainError(
                f"{self.path} holds a run of another configuration, which is left as it is. "
                f"Differences (there → now): {'; '.join(differing)}. "
                "Give a new folder, or the configuration of that run."
            )
        return True


@contextmanager
def locked(path: Path) -> Iterator[RunFolder]:
    """The run folder, created if necessary, locked for one writer at a time.

    The lock is one of the operating system, which releases it when the process ends, for whatever
    reason. A folder that was created here and stays empty is removed, but not its parents.

    Raises:
        TrainError: If another process is training there.
        FileError: If the folder cannot be created.
    """
    made = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(RunLayout(path).lock, "w")  # noqa: SIM115 (open while the lock is held)
    except OSError as error:
        raise FileError(f"cannot train in {path}: {error}; give another folder") from error
    with lock:
        try:
            import fcntl
        except ImportError:  # this system has no such lock
            yield RunFolder(path)
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here = os.stat(RunLayout(path).lock)
            if not os.path.samestat(here, os.fstat(lock.fileno())):
                raise FileExistsError("its lock was removed")  # by another process, just now
        except OSError as error:
            raise TrainError(
                f"another process is training in {path}; wait for it, or give another folder"
            ) from error
        try:
            yield RunFolder(path)
        finally:
            _remove_lock(path, made)


def _remove_lock(path: Path, made: bool) -> None:
    """Removes the lock of a folder that holds nothing else, and the folder if created here."""
    with suppress(OSError):
        lock = RunLayout(path).lock
        if list(path.iterdir()) == [lock]:
            lock.unlink()
            if made:
                path.rmdir()
