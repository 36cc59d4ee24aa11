import gzip
import hashlib
import lzma
from pathlib import Path

import pytest

from afterdrop.data.data_files import Expected, data_folder, find_file, read_content, require_file
from afterdrop.errors import FileError

CONTENT = b"some words of text\n" * 50
EXPECTED = Expected(len(CONTENT), f"sha256:{hashlib.sha256(CONTENT).hexdigest()}")


@pytest.mark.parametrize(
    "name, raw",
    [
        ("a.txt", CONTENT),
        ("a.txt.gz", gzip.compress(CONTENT)),
        ("a.txt.xz", lzma.compress(CONTENT)),
    ],
)
def test_plain_gz_and_xz_give_the_same_checked_content(tmp_path: Path, name: str, raw: bytes):
    (tmp_path / name).write_bytes(raw)
    path = require_file("a.txt", [tmp_path / "not here", tmp_path], "")
    assert path.name == name
    assert read_content(path, EXPECTED) == CONTENT


def test_md5_is_checked_where_only_that_was_published(tmp_path: Path):
    path = tmp_path / "a"
    path.write_bytes(CONTENT)
    digest = hashlib.md5(CONTENT).hexdigest()
    assert read_content(path, Expected(len(CONTENT), f"md5:{digest}")) == CONTENT
    with pytest.raises(FileError, match=r"a has md5 .* expected 0000: .*get it again"):
        read_content(path, Expected(len(CONTENT), "md5:0000"))


@pytest.mark.parametrize("pack, suffix", [(gzip.compress, ".gz"), (lzma.compress, ".xz")])
@pytest.mark.parametrize(
    "keep, why", [(0.0, "is empty"), (0.3, "is truncated"), (0.95, "is truncated")]
)
def test_truncated_archives_are_refused(tmp_path: Path, pack, suffix: str, keep: float, why: str):
    raw = pack(CONTENT)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(raw[: int(len(raw) * keep)])
    with pytest.raises(FileError, match=rf"a\.txt\{suffix} {why}"):
        read_content(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_plain_file_under_an_archive_name_is_refused(tmp_path: Path, suffix: str):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(CONTENT)
    with pytest.raises(FileError, match="damaged or not"):
        read_content(path)


def test_wrong_checksum_wrong_size_empty_and_missing(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(FileError, match=r"a\.txt has sha256 .*, expected .* get it again"):
        read_content(path, EXPECTED)
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(FileError, match=r"has 949 bytes uncompressed, expected 950"):
        read_content(path, EXPECTED)
    path.write_bytes(b"")
    with pytest.raises(FileError, match=r"a\.txt is empty"):
        read_content(path)
    with pytest.raises(FileError, match="cannot read"):
        read_content(tmp_path / "b.txt")


def test_a_folder_with_the_name_of_a_file_is_not_found(tmp_path: Path):
    (tmp_path / "enwik8").mkdir()
    assert find_file("enwik8", [tmp_path]) is None


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AFTERDROP_DATA", "from-environment")
    assert data_folder() == Path("from-environment")
    assert data_folder("argument") == Path("argument")
    monkeypatch.delenv("AFTERDROP_DATA")
    with pytest.raises(FileError, match=r"--data DIR.*AFTERDROP_DATA"):
        data_folder()


def test_a_device_is_refused_and_a_file_that_does_not_fit_into_memory(tmp_path, monkeypatch):
    with pytest.raises(FileError, match="cannot read /dev/zero: it is a device"):
        read_content(Path("/dev/zero"))

    def too_large(path):
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", too_large)
    with pytest.raises(FileError, match=r"text\.txt: it does not fit into memory; divide it"):
        read_content(tmp_path / "text.txt")
