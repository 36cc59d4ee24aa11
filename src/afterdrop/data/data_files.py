"""Finds data files and reads them: plain, gz or xz, verified by size and checksum."""

import gzip
import hashlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from afterdrop.errors import FileError

ENVIRONMENT_VARIABLE = "AFTERDROP_DATA"
_OPEN: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    "": lambda file: file,
    ".gz": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
    ".xz": lambda file: cast(BinaryIO, lzma.LZMAFile(file)),  # noqa: SIM115 (the caller does)
}
# A compressed text of unknown size may become this many times as large, or this many bytes.
_RATIO, _FREE = 200, 64 << 20


@dataclass(frozen=True)
class Expected:
    """What the uncompressed content of a published file must be.

    Attributes:
        size: Number of bytes.
        digest: `"sha256:HEX"`, or `"md5:HEX"` where only an MD5 was published.

    Example:
        >>> import hashlib
        >>> expected = Expected(5, "sha256:" + hashlib.sha256(b"a b c").hexdigest())
        >>> expected.check(b"a b c", "text")
        >>> expected.check(b"a b", "text")
        Traceback (most recent call last):
        afterdrop.errors.FileError: text has 3 bytes uncompressed, expected 5: it is incomplete or \
another version; get it again
    """

    size: int
    digest: str

    def check(self, content: bytes, source: str) -> None:
        """Raises a `FileError` that names `source` unless size and checksum match."""
        if len(content) != self.size:
            raise FileError(
                f"{source} has {len(content):,} bytes uncompressed, expected {self.size:,}: "
                "it is incomplete or another version; get it again"
            )
        algorithm, _, wanted = self.digest.partition(":")
        found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if found != wanted:
            raise FileError(
                f"{source} has {algorithm} {found}, expected {wanted}: "
                "it is corrupt or another version; get it again"
            )


def data_folder(data: str | Path | None = None) -> Path:
    """The folder that holds the data: the argument, or else `AFTERDROP_DATA`.

    Args:
        data: A folder, or None for the environment variable.

    Returns:
        The folder, which may not exist.

    Raises:
        FileError: If neither names a folder.

    Example:
        >>> data_folder("somewhere").name
        'somewhere'
    """
    chosen = data if data is not None else os.environ.get(ENVIRONMENT_VARIABLE)
    if not chosen:
        raise FileError(
            f"no data folder: pass data=DIR (--data DIR) or set {ENVIRONMENT_VARIABLE}=DIR"
        )
    return Path(chosen).expanduser()


def find_file(name: str, folders: Sequence[Path]) -> Path | None:
    """The first of `name`, `name.gz` and `name.xz` that is a file in one of `folders`.

    Example:
        >>> find_file("train.txt", [Path("no-such-folder")]) is None
        True
    """
    for folder in folders:
        for suffix in _OPEN:
            path = folder / (name + suffix)
            if path.is_file():
                return path
    return None


def require_file(name: str, folders: Sequence[Path], remedy: str) -> Path:
    """As `find_file`, but raises a `FileError` with the folders searched and the `remedy`.

    Example:
        >>> require_file("train.txt", [Path("nowhere")], "make one")
        Traceback (most recent call last):
        afterdrop.errors.FileError: no train.txt (or .gz, .xz) in nowhere: make one
    """
    path = find_file(name, folders)
    if path is None:
        places = " or ".join(str(folder) for folder in folders)
        raise FileError(f"no {name} (or .gz, .xz) in {places}: {remedy}")
    return path


def decompress(raw: bytes, path: str | Path, size: int | None = None) -> bytes:
    """Decompresses the content of a file according to its name: `.gz`, `.xz` or neither.

    Args:
        raw: The content.
        path: Its name.
        size: Bytes that it has uncompressed; None if this is not known.

    Raises:
        FileError: If it is truncated, not in that format, or larger than it may be.

    Example:
        >>> decompress(gzip.compress(b"a b c"), "train.txt.gz")
        b'a b c'
    """
    suffix = Path(path).suffix if Path(path).suffix in _OPEN else ""
    largest = max(_FREE, _RATIO * len(raw)) if size is None else size
    parts, left = [], largest + 1
    try:
        with _OPEN[suffix](io.BytesIO(raw)) as file:
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise FileError(
            f"{path} is truncated, damaged or not {suffix[1:]} ({error}); get it again"
        ) from error
    if not left:
        raise FileError(
            f"{path} has more than {largest:,} bytes uncompressed, the limit for it; get it again, "
            "or decompress it yourself"
        )
    return b"".join(parts)


def read_content(path: Path, expected: Expected | None = None) -> bytes:
    """Reads a file, decompresses and checks it.

    Args:
        path: A file; `.gz` and `.xz` are decompressed, anything else is read as it is.
        expected: Size and checksum that the content must have; None checks neither.

    Returns:
        The uncompressed content, never empty.

    Raises:
        FileError: If the file cannot be read, is truncated, empty, or not what was expected.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "train.txt.gz")
        ...     _ = path.write_bytes(gzip.compress(b"a b c"))
        ...     read_content(path)
        b'a b c'
    """
    if path.is_char_device() or path.is_block_device():  # it may never end
        raise FileError(f"cannot read {path}: it is a device; give a file, or a pipe")
    try:
        raw = path.read_bytes()
    except MemoryError as error:
        raise FileError(f"cannot read {path}: it does not fit into memory; divide it") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {error}") from error
    content = decompress(raw, path, None if expected is None else expected.size) if raw else b""
    if not content:
        raise FileError(f"{path} is empty; put the text there, or get the file again")
    if expected is not None:
        expected.check(content, str(path))
    return content
