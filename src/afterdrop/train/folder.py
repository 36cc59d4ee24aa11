"""The files of a training run (`config.json`, `metrics.jsonl`, `checkpoint/`) and their lock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from afterdrop.errors import DamagedError, FileError
from afterdrop.file_locks import in_place, sole_lock
from afterdrop.files import (
    DIGEST,
    check_seal,
    parse_json,
    read_json,
    read_whole,
    remove_abandoned,
    sealed,
    write_atomic,
    write_json,
)
from afterdrop.run_layout import RunLayout
from afterdrop.train.checks import ConfigError, TrainError
from afterdrop.train.config import TrainConfig, differences
from afterdrop.typed_records import read_record

Resume = Literal["auto", "require", "refuse"]
RESUMES: tuple[Resume, ...] = ("auto", "require", "refuse")
_KIND, _VERSION = "afterdrop-run", 2


class _RunRecord(TypedDict):
    """What `config.json` has; the facts say what the data made of the configuration."""

    config: dict[str, Any]
    model: dict[str, Any]
    parameters: int
    unit: str
    data: dict[str, Any]
    data_folder: str | None


class MetricsLine(TypedDict):
    """What a line of `metrics.jsonl` has; the fields that are not required came later."""

    interval: int
    step: int
    xe: float
    loss: NotRequired[float | None]
    xe_optimal: NotRequired[float]
    temperature: NotRequired[float]
    learning_rate: NotRequired[float]
    seconds: NotRequired[float]


class RunFolder(RunLayout):
    """A run folder as training writes it."""

    def write_config(self, config: TrainConfig, facts: Mapping[str, Any]) -> None:
        """Writes the configuration and facts such as the sizes of the model."""
        write_json(self.config, _KIND, _VERSION, {"config": config.to_dict(), **facts})

    def read_config(self) -> tuple[TrainConfig, dict[str, Any]]:
        """The configuration and the facts.

        Raises:
            FileError: If this is not a run folder, or its configuration is damaged.
        """
        try:
            content = read_record(_RunRecord, read_json(self.config, _KIND, _VERSION))
            facts = {name: value for name, value in content.items() if name != "config"}
            return TrainConfig.from_dict(content["config"]), facts
        except (ConfigError, ValueError) as error:
            raise FileError(
                f"{self.config} is damaged ({error}); restore it, or train again in a new folder"
            ) from error

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Appends one line and waits until it is on the disk.

        Raises:
            FileError: If it cannot be written; resuming removes an incomplete line.
        """
        try:
            with open(self.metrics, "a", encoding="utf-8", opener=in_place) as file:
                file.write(_line(line))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(f"cannot write {self.metrics}: {error}") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines; an incomplete last line, left by a crash, is omitted.

        Raises:
            FileError: If a line is damaged, or was written by an older afterdrop.
        """
        if not self.metrics.exists():
            return []
        remedy = "Restore a copy, or move the file away to continue without the old lines."
        found: list[dict[str, Any]] = []
        *lines, last = read_whole(self.metrics).split(b"\n")
        if last[-2:-1] == b"}":  # a write that was cut off leaves nothing behind the object
            lines.append(last)
        for number, text in enumerate(lines, start=1):
            source = f"line {number} of {self.metrics}"
            try:
                line = read_record(MetricsLine, parse_json(text, source))
                check_seal(source, {**line})
                if line["step"] < 0:
                    raise ValueError(f"step {line['step']} is negative")
                if found and line["interval"] != (before := found[-1]["interval"]) + 1:
                    raise ValueError(f"interval {line['interval']} after interval {before}")
            except DamagedError as error:
                raise DamagedError(f"{error}. {remedy}") from error
            except ValueError as error:
                raise DamagedError(
                    f"{source} is not a line of metrics ({error}). {remedy}"
                ) from error
            found.append({name: value for name, value in line.items() if name != DIGEST})
        return found

    def trim_metrics(self, interval: int) -> None:
        """Removes lines that a killed run wrote after the checkpoint of validation `interval`."""
        kept = [line for line in self.read_metrics() if line["interval"] <= interval]
        content = "".join(map(_line, kept)).encode()
        if self.metrics.exists() and read_whole(self.metrics) != content:
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


def _line(line: Mapping[str, Any]) -> str:
    return json.dumps(sealed(line)) + "\n"


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
    with ExitStack() as held:
        if made:
            held.callback(_remove_empty, path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            held.enter_context(sole_lock(RunLayout(path).lock))
            for folder in (path, RunLayout(path).last.parent):
                remove_abandoned(folder)
        except BlockingIOError as error:
            raise TrainError(
                f"another process is training in {path}; wait for it, or give another folder"
            ) from error
        except OSError as error:
            raise FileError(f"cannot train in {path}: {error}; give another folder") from error
        yield RunFolder(path)


def _remove_empty(path: Path) -> None:
    with suppress(OSError):  # it is not empty, as a rule
        path.rmdir()
