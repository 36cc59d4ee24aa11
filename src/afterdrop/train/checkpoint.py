"""Checkpoints: one file of tensors each, with facts in its header.

Files are written atomically: whenever the process is killed, the file is either the old checkpoint
or the new one. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from afterdrop.errors import DamagedError, FileError
from afterdrop.files import TEMPORARY, check_header
from afterdrop.models.fingerprint import tensors_fingerprint
from afterdrop.tensor_files import read_note, read_tensors, write_tensors
from afterdrop.typed_records import read_record

KIND, VERSION = "afterdrop-checkpoint", 2


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by dotted name, and JSON-serialisable facts.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "last.safetensors")
        ...     write_checkpoint(path, Checkpoint({"model.weight": torch.ones(2)}, {"step": 7}))
        ...     read_checkpoint(path).group("model"), read_facts(path)
        ({'weight': tensor([1., 1.])}, {'step': 7})
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names start with `prefix` and a dot, without them."""
        start = f"{prefix}."
        return {n[len(start) :]: t for n, t in self.tensors.items() if n.startswith(start)}

    def weights(self) -> dict[str, Tensor]:
        """The weights of the model that the checkpoint stands for: the averaged ones if any."""
        return (self.group("average") if self.facts.get("averaged") else {}) or self.group("model")

    def copy(self) -> Checkpoint:
        """The same checkpoint with its own copies of the tensors."""
        return Checkpoint({n: t.detach().clone() for n, t in self.tensors.items()}, self.facts)


def grouped(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `Checkpoint.group`.

    Example:
        >>> list(grouped("model", {"weight": None}))
        ['model.weight']
    """
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint atomically, with the fingerprint of its weights in the header.

    Raises:
        FileError: If it cannot be written; an existing file is left as it is.
    """
    header = {
        "kind": KIND,
        "version": VERSION,
        "fingerprint": tensors_fingerprint(checkpoint.weights()),
        "facts": dict(checkpoint.facts),
    }
    write_tensors(path, checkpoint.tensors, header)


def keep_copy(path: Path, copy: Path) -> None:
    """Keeps the checkpoint at `path`, if there is one, as `copy` too, which is replaced at once.

    Raises:
        FileError: If the copy cannot be made.
    """
    if not path.exists():
        return
    temporary = copy.with_name(f".{copy.name}{TEMPORARY}")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:  # the file system has no hard links
            shutil.copyfile(path, temporary)
        os.replace(temporary, copy)
    except OSError as error:
        raise FileError(f"cannot write {copy}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads what `write_checkpoint` wrote, onto the CPU.

    Raises:
        FileError: If it is missing, damaged, foreign or of another version.
    """
    try:
        tensors, header = read_tensors(path)
    except DamagedError as error:
        raise DamagedError(f"the checkpoint {error}") from error
    return Checkpoint(tensors, dict(_checked(path, header)["facts"]))


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint, without reading its tensors.

    Raises:
        FileError: As `read_checkpoint`.
    """
    return dict(_read_header(path)["facts"])


def read_fingerprint(path: Path) -> str:
    """The fingerprint of the checkpoint's weights, without reading its tensors.

    Raises:
        FileError: As `read_checkpoint`.
    """
    return str(_read_header(path)["fingerprint"])


class _Header(TypedDict):
    """What the header has beside kind and version."""

    fingerprint: str
    facts: dict[str, Any]


def _read_header(path: Path) -> _Header:
    try:
        header = read_note(path)
    except DamagedError as error:
        raise DamagedError(f"the checkpoint {error}") from error
    return _checked(path, header)


def _checked(path: Path, header: dict[str, Any]) -> _Header:
    check_header(path, header, KIND, VERSION)
    try:
        return read_record(_Header, header)
    except ValueError as error:
        raise FileError(
            f"{path} is damaged ({error}); use another checkpoint, or train again in a new folder"
        ) from error
