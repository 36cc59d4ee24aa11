"""Downloads published sets on request. Nothing else in afterdrop opens a network connection."""

import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from afterdrop.data.data_files import Expected, data_folder, decompress, find_file, read_content
from afterdrop.data.download import Patience, download
from afterdrop.data.images import MNIST_FILES
from afterdrop.data.named import ENWIK8, WIKITEXT_2
from afterdrop.data.shown_address import shown_address
from afterdrop.errors import DataError, FileError
from afterdrop.files import write_atomic
from afterdrop.plain_text import first_line, one_line

# What `zipfile` raises for damaged, encrypted (RuntimeError) and unsupported archives.
_ARCHIVE_ERRORS = (
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)
_MEMBER = b"PK\x01\x02"  # begins the entry of a member in the directory of a zip archive
_MEMBERS = 1000  # at most; archives that are published have a few
_MIRROR = "give the address of a folder with the same files, as in https://host/folder"


@dataclass(frozen=True)
class Download:
    """A file and its public addresses.

    Attributes:
        file: Its name, at these addresses and at a mirror.
        bases: Addresses of the folders that hold it, in order of preference.
        contents: The files that it contains, and the expected uncompressed content of each. A zip
            archive contains members of these names; any other file is stored as it is.
    """

    file: str
    bases: tuple[str, ...]
    contents: tuple[tuple[str, Expected], ...]

    @property
    def largest(self) -> int:
        """Bytes that the file has at most: its contents as they are, and what packs them."""
        return sum(expected.size for _, expected in self.contents) * 101 // 100 + (1 << 20)

    def urls(self, mirror: str | None) -> list[str]:
        """The addresses to try, in order."""
        bases = (mirror,) if mirror else self.bases
        return [f"{base.rstrip('/')}/{self.file}" for base in bases]

    def unpack(self, raw: bytes) -> dict[str, bytes]:
        """The files to store, after checking them.

        Raises:
            FileError: If the download is damaged or not what was published.
        """
        if not self.file.endswith(".zip"):
            ((_, expected),) = self.contents
            expected.check(decompress(raw, self.file, expected.size), self.file)
            return {self.file: raw}
        files = {name: _member(raw, name, expected) for name, expected in self.contents}
        for name, expected in self.contents:
            expected.check(files[name], f"{name} in {self.file}")
        return files


_MNIST_BASES = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "mnist": tuple(
        Download(f"{name}.gz", _MNIST_BASES, ((name, expected),))
        for name, expected in MNIST_FILES.items()
    ),
    "wikitext-2": (
        Download("wikitext-2-v1.zip", ("https://wikitext.smerity.com",), WIKITEXT_2.files),
    ),
    "enwik8": (
        Download(
            "enwik8.zip",
            ("https://mattmahoney.net/dc", "https://data.deepai.org"),
            ENWIK8.files,
        ),
    ),
}
_PTB_REMEDY = (
    "the Penn Treebank is licensed by the Linguistic Data Consortium (catalogue number LDC99T42, "
    "https://catalog.ldc.upenn.edu/LDC99T42), so afterdrop has no address for it. The files "
    "needed are Mikolov's preprocessing of it, in his RNNLM toolkit's simple-examples.tgz"
)
NOT_FETCHED = {
    "ptb": f"{_PTB_REMEDY}: put ptb.train.txt, ptb.valid.txt, ptb.test.txt into DIR/ptb",
    "ptb-char": f"{_PTB_REMEDY}: put ptb.char.train.txt, ptb.char.valid.txt, ptb.char.test.txt "
    "into DIR/ptb",
}


def fetch(
    name: str,
    data: str | Path | None = None,
    *,
    mirror: str | None = None,
    patience: Patience | None = None,
    progress: bool = True,
) -> list[Path]:
    """Downloads a published set into the data folder; correct files that exist are kept.

    Args:
        name: `mnist`, `wikitext-2` or `enwik8`.
        data: The data folder; None is the environment variable AFTERDROP_DATA.
        mirror: Address of another folder that holds the same files.
        patience: Time-outs and retries; None is 30 s without a byte, 5 retries and an
            hour per file.
        progress: Whether to show a bar.

    Returns:
        The files of the set.

    Raises:
        DataError: If the set cannot be fetched; the message says where to get it.
        FileError: If the download failed, or an existing file is damaged.

    Example:
        >>> fetch("builtin:digits", "DIR")
        Traceback (most recent call last):
        afterdrop.errors.DataError: name='builtin:digits' is not a set that can be fetched; \
those are mnist, wikitext-2, enwik8
    """
    if name in NOT_FETCHED:
        raise DataError(f"{name} cannot be fetched: {NOT_FETCHED[name]}")
    if name not in DOWNLOADS:
        raise DataError(
            f"name={name!r} is not a set that can be fetched; those are {', '.join(DOWNLOADS)}"
        )
    if mirror is not None:
        check_mirror(mirror)
    folder = data_folder(data)
    return [
        path
        for item in DOWNLOADS[name]
        for path in _fetch_one(item, name, folder, mirror, patience or Patience(), progress)
    ]


def _fetch_one(
    item: Download, name: str, data: Path, mirror: str | None, patience: Patience, progress: bool
) -> list[Path]:
    target = data / name
    present = {file: find_file(file, [target, data]) for file, _ in item.contents}
    for file, expected in item.contents:
        path = present[file]
        if path is not None:
            try:
                read_content(path, expected)
            except FileError as error:
                raise FileError(f"{error}: remove it and fetch {name} once more") from error
    found = [path for path in present.values() if path is not None]
    if len(found) == len(item.contents):
        return found
    part = target / f"{item.file}.part"
    files = download(item.urls(mirror), part, item.unpack, patience, progress, item.largest)
    for file, content in files.items():
        write_atomic(target / file, content)
    part.unlink()
    return [target / file for file in files]


def _member(raw: bytes, name: str, expected: Expected) -> bytes:
    """A member of a zip archive in any folder; reads at most one byte more than expected."""
    if raw.count(_MEMBER) > _MEMBERS:  # the library reads them all into memory
        raise FileError(f"the archive with {name} has more than {_MEMBERS:,} members; get it again")
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            found = [i for i in archive.infolist() if i.filename.rpartition("/")[2] == name]
            if not found:
                raise FileError(f"the archive has no {name}; is it another version?")
            # Of other compressions, the library unpacks more than was asked for.
            if found[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile(f"{name} is compressed in another way than by deflate")
            with archive.open(found[0]) as member:
                return member.read(expected.size + 1)
    except FileError:
        raise
    except _ARCHIVE_ERRORS as error:
        raise FileError(
            f"the archive with {name} is damaged or encrypted ({first_line(error)}); get it again"
        ) from error


def check_mirror(mirror: str) -> None:
    """Requires an address that files can be fetched from.

    Raises:
        DataError: If it is malformed or has a password or a query; the message shows neither.
    """
    shown = one_line(shown_address(mirror))[:60]
    if "@" in mirror:  # before the library parses it, whose errors show the password
        raise DataError(
            f"the mirror at {shown!r} is given with a user name or password, which is not sent; "
            f"{_MIRROR} (and with %40 for an @ in the name of the folder)"
        )
    if "?" in mirror or "#" in mirror:
        raise DataError(
            f"mirror={shown!r} is given with a query or fragment, after which no name of a file "
            f"can follow; {_MIRROR}"
        )
    try:
        parts = urlsplit(mirror)
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except ValueError as error:  # brackets, port, or a host whose name is too long
        raise DataError(
            f"mirror={shown!r} is not a valid address ({first_line(error)}); {_MIRROR}"
        ) from None
    zone = "[" in parts.netloc  # of an IPv6 address; other hosts have no escapes
    plain = mirror.isprintable() and " " not in mirror and ("%" not in parts.netloc or zone)
    if parts.scheme not in ("http", "https") or not host or port == 0 or not plain:
        raise DataError(f"mirror={shown!r} is not an http or https address; {_MIRROR}")
