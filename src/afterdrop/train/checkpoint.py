"""Checkpoints: one safetensors file each, with facts as JSON in its header.

Files are written atomically: whenever the process is killed, the file is either the old checkpoint
or the new one. Nothing is pickled.
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
from afterdrop.models.fingerprint import tensors_fingerprint

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
    # Copies, because safetensors cannot save views of one storage (h within all h of a window).
    tensors = {
        n: t.detach().to("cpu", copy=True).contiguous() for n, t in checkpoint.tensors.items()
    }
    header = {
        "kind": KIND,
        "version": VERSION,
        "fingerprint": tensors_fingerprint(checkpoint.weights()),
        "facts": dict(checkpoint.facts),
    }
    write_atomic(path, save(tensors, metadata={"afterdrop": json.dumps(header)}))


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads what `write_checkpoint` wrote, onto the CPU.

    Raises:
        FileError: If it is missing, truncated, foreign or of another version.
    """
    facts = read_facts(path)
    with safe_open(path, "pt") as file:
        # Clones, because memory mapped from a file may not be aligned as torch's own is.
        return Checkpoint({name: file.get_tensor(name).clone() for name in file.keys()}, facts)  # noqa: SIM118


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


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("afterdrop", "null"))
    except (OSError, SafetensorError, ValueError) as error:
        raise FileError(
            f"cannot read the checkpoint {path}: {error}; use another one, or train again in a "
            "new folder"
        ) from error
    check_header(path, header, KIND, VERSION)
    return header
