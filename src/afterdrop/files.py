"""Files that are written atomically and carry a digest of their content.

A reader sees either the old content or the new one, never a part of it, and notices if a single bit
of it has changed since it was written. A JSON object carries the digest of its other entries under
the key `digest`. A line of a JSONL file is such an object, and so is the header of a file of
tensors (`tensor_files.py`).
"""

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from afterdrop import typed_records
from afterdrop.errors import DamagedError, FileError
from afterdrop.file_locks import remove_unlocked, take, without_waiting

DIGEST = "digest"
TEMPORARY = ".afterdrop.tmp"  # the suffix of temporary files, which no other program uses

_LARGEST = 1 << 26  # bytes of a file that is decoded as a whole; a long study has a few million


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


@contextlib.contextmanager
def written_atomically(path: str | Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` to write to, which is synced and renamed into place.

    On return the file is on the disk: what it replaces may be removed. Temporary files that killed
    processes left in the same folder are removed.

    Args:
        path: The file; parent folders are created. It keeps its permissions; a new one has those of
            any other new file of the user.

    Raises:
        FileError: If the file cannot be written (no space, no permission, a device or a pipe); an
            existing file is left as it is.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # it would be replaced
            raise FileError(f"cannot write {path}: it is a device or a pipe; name a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(path.parent)
        file, temporary = _open_temporary(path)
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if not isinstance(error, OSError) or isinstance(error, FileError):
            raise
        raise FileError(
            f"cannot write {path}: {error}; what was there before is unchanged"
        ) from error


def write_atomic(path: str | Path, content: bytes) -> None:
    """Writes `content` to a file, atomically (`written_atomically`)."""
    with written_atomically(path) as file:
        file.write(content)


def remove_abandoned(folder: Path) -> None:
    """Removes temporary files in a folder whose writers have ended without removing them."""
    for path in folder.glob(f".*{TEMPORARY}"):
        remove_unlocked(path)


def _open_temporary(path: Path) -> tuple[BinaryIO, Path]:
    """A new temporary file for `path`, locked so that other writers know it is in use."""
    while True:
        name = path.parent / f".{path.name[:40]}.{secrets.token_hex(4)}{TEMPORARY}"
        file = open(name, "xb")  # noqa: SIM115 (open while the lock is held)
        try:
            take(file)
            if os.fstat(file.fileno()).st_nlink:
                with contextlib.suppress(OSError):  # no file yet, or a system without permissions
                    os.chmod(name, stat.S_IMODE(path.stat().st_mode))
                return file, name
        except BlockingIOError:
            pass
        file.close()  # another process took it for an abandoned one before it was locked


def _sync_folder(folder: Path) -> None:
    """Waits until a renamed file has its new name on the disk, too, where systems can do that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON object, as it will be read, with the digest of its other entries as its last one.

    Raises:
        FileError: If it could not be read back (`as_json`).

    Example:
        >>> sealed({"step": 7})
        {'step': 7, 'digest': 'fae94118762494cee2b49db1acccff08'}
    """
    others = as_json({name: value for name, value in record.items() if name != DIGEST})
    return {**others, DIGEST: _digest(others)}


def as_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """An object as JSON gives it back.

    Raises:
        FileError: If `parse_json` would refuse it, so that nothing is written that cannot be read.

    Example:
        >>> as_json({"rates": (0.5, 0.25)})
        {'rates': [0.5, 0.25]}
    """
    try:
        return typed_records.parse_json(json.dumps(record))
    except (TypeError, ValueError) as error:
        raise FileError(f"{record!r:.60} cannot be stored as JSON: {error}") from error


def check_seal(source: str | Path, record: dict[str, Any]) -> None:
    """Requires that an object carries the digest of its other entries.

    Args:
        source: Where it comes from, for messages.
        record: The object.

    Raises:
        DamagedError: If its digest is missing or another one.
    """
    found = record.get(DIGEST)
    if found is None:
        raise DamagedError(
            f"{source} has no digest: it is damaged, or from an older afterdrop; create it again"
        )
    if found != _digest({name: value for name, value in record.items() if name != DIGEST}):
        raise DamagedError(
            f"{source} does not match its digest: it was damaged or edited since afterdrop wrote "
            "it; restore it from a copy, or create it again"
        )


def _digest(record: dict[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_json(path: str | Path, kind: str, version: int, content: dict[str, Any]) -> None:
    """Writes a JSON object with its `kind`, schema `version` and digest.

    Raises:
        FileError: If the file cannot be written, or the content could not be read back.
    """
    record = sealed({"kind": kind, "version": version, **content})
    write_atomic(path, (json.dumps(record, indent=2) + "\n").encode())


def open_regular(path: str | Path) -> FileIO:
    """Opens a file for reading, unbuffered.

    Raises:
        FileError: If it cannot be opened, or is a pipe or a device, which may never end.
    """
    try:
        file = open(path, "rb", buffering=0, opener=without_waiting)  # noqa: SIM115 (the caller does)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileError(f"cannot read {path}: it is not a regular file; restore it from a copy")
    return file


def read_whole(path: str | Path) -> bytes:
    """The content of a file, which is refused if it is far larger than any that is read at once.

    Raises:
        FileError: As `open_regular`, or if the file is too large.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST:
            raise DamagedError(
                f"{path} has {size:,} bytes, and no such file has more than {_LARGEST:,}; restore "
                "it from a copy, or create it again"
            )
        try:
            return file.read()
        except OSError as error:
            raise FileError(f"cannot read {path}: {error}") from error


def read_json(path: str | Path, kind: str, version: int) -> dict[str, Any]:
    """Reads a file of `write_json` and refuses anything else.

    Raises:
        FileError: If the file is missing, damaged, of another kind or of another version.
    """
    record = parse_json(read_whole(path), path)
    check_header(path, record, kind, version)
    assert isinstance(record, dict)
    check_seal(path, record)
    return {k: v for k, v in record.items() if k not in ("kind", "version", DIGEST)}


def parse_json(content: bytes, source: str | Path) -> Any:
    """The value of a JSON text, decoded strictly (`typed_records.parse_json`).

    Raises:
        DamagedError: If it cannot be decoded; names `source`.
    """
    try:
        return typed_records.parse_json(content)
    except ValueError as error:
        raise DamagedError(f"{source} is not JSON ({error}); is it complete?") from error


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
