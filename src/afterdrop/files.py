"""Atomic writes: a reader sees either the old content or the new one, never a part of it."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from afterdrop.errors import FileError


def make_folder(path: Path) -> None:
    """Creates a folder, with its parents, and checks that it can be written to.

    Raises:
        FileError: If it cannot be created, is a file or is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise FileError(f"cannot write to the folder {path}: {error}") from error


def write_atomic(path: str | Path, content: bytes) -> None:
    """Writes `content` to a temporary file beside `path`, syncs it, and renames it into place.

    Args:
        path: The file; parent folders are created.
        content: The bytes.

    Raises:
        FileError: If the file cannot be written (no space, no permission); an existing file is
            left as it is.
    """
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise FileError(
            f"cannot write {path}: {error}; what was there before is unchanged"
        ) from error


def write_json(path: str | Path, kind: str, version: int, content: dict[str, Any]) -> None:
    """Writes a JSON object with its `kind` and schema `version`."""
    record = {"kind": kind, "version": version, **content}
    write_atomic(path, (json.dumps(record, indent=2) + "\n").encode())


def read_json(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """Reads a file of `write_json` and refuses anything else.

    Raises:
        FileError: If the file is missing, not JSON, of another kind or of another version.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error}") from error
    except ValueError as error:
        raise FileError(f"{path} is not JSON ({error}); is it complete?") from error
    check_header(path, record, kind, version)
    return {k: v for k, v in record.items() if k not in ("kind", "version")}


def check_header(path: str | Path, header: object, kind: str, version: int) -> None:
    """Requires that the header of a file has a given kind and version.

    Raises:
        FileError: If it has another kind or version.

    Example:
        >>> check_header("a.json", {"kind": "afterdrop-run", "version": 1}, "afterdrop-run", 1)
    """
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise FileError(f"{path} is not an {kind} file; create it with afterdrop")
    if header.get("version") != version:
        raise FileError(
            f"{path} has schema version {header.get('version')!r}, this afterdrop reads {version}; "
            "create it again or install the matching afterdrop"
        )
