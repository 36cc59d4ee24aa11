"""Checkpoints: one safetensors file each, written atomically; facts are JSON in its header.

A file is either the old checkpoint or the new one, whenever the process dies. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from afterdrop.errors import FileError
from afterdrop.files import check_header, write_atomic

KIND, VERSION = "afterdrop-checkpoint", 2


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by dotted name, and JSON-friendly facts.

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

    def copy(self) -> Checkpoint:
        """The same with tensors of its own."""
        return Checkpoint({n: t.detach().clone() for n, t in self.tensors.items()}, self.facts)


def grouped(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `Checkpoint.group`.

    Example:
        >>> list(grouped("model", {"weight": None}))
        ['model.weight']
    """
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint atomically.

    Raises:
        FileError: If it cannot be written; an old one stays.
    """
    # Copies: parts of one storage, such as h within all h of a window, cannot be saved as they are.
    tensors = {
        n: t.detach().to("cpu", copy=True).contiguous() for n, t in checkpoint.tensors.items()
    }
    header = {"kind": KIND, "version": VERSION, "facts": dict(checkpoint.facts)}
    write_atomic(path, save(tensors, metadata={"afterdrop": json.dumps(header)}))


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads what `write_checkpoint` wrote, onto the CPU.

    Raises:
        FileError: If it is missing, truncated, foreign or of another version.
    """
    facts = read_facts(path)
    with safe_open(path, "pt") as file:
        # Clones: memory that is mapped from a file need not be aligned as torch's own.
        return Checkpoint({name: file.get_tensor(name).clone() for name in file.keys()}, facts)  # noqa: SIM118


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a checkpoint, without its tensors.

    Raises:
        FileError: As `read_checkpoint`.
    """
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("afterdrop", "null"))
    except (OSError, SafetensorError, ValueError) as error:
        raise FileError(
            f"cannot read the checkpoint {path}: {error}; use another one, or train again in a "
            "new folder"
        ) from error
    check_header(path, header, KIND, VERSION)
    return dict(header["facts"])
