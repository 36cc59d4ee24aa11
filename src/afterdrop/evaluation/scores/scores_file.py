"""Scores as files: safetensors with the protocol in the header."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load, save
from torch import Tensor

from afterdrop.errors import AfterdropError, FileError, ScoresError
from afterdrop.evaluation.request import Protocol
from afterdrop.evaluation.scores import schema
from afterdrop.files import check_header, write_atomic

_KIND, _VERSION = "afterdrop-scores", 2


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], note: dict[str, Any]) -> None:
    """Writes tensors and a note as safetensors, atomically."""
    content = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomic(path, save(content, metadata={"afterdrop": json.dumps(note)}))


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `write_tensors` wrote; the note is empty in a foreign file.

    Raises:
        FileError: If the file is missing, truncated or not safetensors.
    """
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {}).get("afterdrop", "{}")
        tensors = load(Path(path).read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise FileError(f"cannot read {path}: {error}; is it complete?") from error
    try:
        note = json.loads(text)
    except ValueError:
        note = {}
    return tensors, note if isinstance(note, dict) else {}


def write_scores(path: str | Path, protocol: Protocol, tensors: Mapping[str, Tensor]) -> None:
    """Writes scores."""
    note = {"kind": _KIND, "version": _VERSION, "protocol": protocol.to_json()}
    write_tensors(path, tensors, note)


def read_scores(path: str | Path) -> tuple[Protocol, dict[str, Tensor]]:
    """Reads scores.

    Raises:
        FileError: If the file is missing, truncated, foreign or of another version.
    """
    tensors, note = read_tensors(path)
    check_header(path, note, _KIND, _VERSION)
    try:
        protocol = Protocol.from_json(note["protocol"])
    except (AfterdropError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path} is foreign or damaged: no protocol ({error})") from error
    try:
        schema.check(tensors, protocol)
    except ScoresError as error:
        raise FileError(f"{path} is damaged: {error}") from error
    return protocol, tensors
