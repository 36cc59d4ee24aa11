"""Atomic files: a reader sees the old content or the new one, never a part."""

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from afterdrop.errors import FileError


def make_folder(path: Path) -> None:
    """Makes a folder that can be written to, and those above it.

    Raises:
        FileError: If it cannot be made, is a file or must not be written to.
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
        path: Where the file goes; parent folders are made.
        content: The bytes.

    Raises:
        FileError: If the file cannot be written (no space, no permission); an old file stays.
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
    """Writes a JSON object that says what it is (`kind`) and in which schema `version`."""
    record = {"kind": kind, "version": version, **content}
    write_atomic(path, (json.dumps(record, indent=2) + "\n").encode())


def read_json(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """Reads what `write_json` wrote and refuses anything else.

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
    """Requires what a file says of itself to be of a kind and version.

    Raises:
        FileError: If it is foreign or of another version.

    Example:
        >>> check_header("a.json", {"kind": "afterdrop-run", "version": 1}, "afterdrop-run", 1)
    """
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise FileError(f"{path} is foreign: it is not an {kind} file; make it with afterdrop")
    if header.get("version") != version:
        raise FileError(
            f"{path} has schema version {header.get('version')!r}, this afterdrop reads {version}; "
            "make it again or install the matching afterdrop"
        )
