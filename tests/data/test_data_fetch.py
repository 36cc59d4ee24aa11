"""`fetch` against a real server that truncates, corrupts, ignores Range, refuses and stalls."""

import contextlib
import errno
import gzip
import hashlib
import http.client
import io
import os
import ssl
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from afterdrop.data import Patience, fetch, load
from afterdrop.data import download as download_module
from afterdrop.data.data_files import Expected
from afterdrop.data.fetch_sets import DOWNLOADS, Download
from afterdrop.errors import DataError, FileError

PLAIN = bytes(range(256)) * 2_000
EXPECTED = Expected(len(PLAIN), f"sha256:{hashlib.sha256(PLAIN).hexdigest()}")
PACKED = gzip.compress(PLAIN, compresslevel=0)
QUICK = Patience(timeout=0.3, retries=3, backoff=0.01)


# What comes before and after a body, and of what there is no end.
_FLOODS = {
    "body of a redirect": (b"302 Found\nLocation: /data.gz\n\n", b"x" * (1 << 16)),
    "intermediate answers": (b"100 Continue\n\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "trailers": (
        b"200 OK\nTransfer-Encoding: chunked\n\n1\nx\n0\n",
        b"Name: value\r\n" * 1000,
    ),
    "slow redirect": (b"302 Found\nLocation: /data.gz\n\n", b"x"),
    "slow header": (b"200 OK\nName: ", b"x"),
    "slow chunk size": (b"200 OK\nTransfer-Encoding: chunked\n\n1;", b"x"),
}


class Server(ThreadingHTTPServer):
    """Serves `files`; each of the first requests meets one of `misdeeds`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.misdeeds: list[str] = []
        self.ranges: list[str | None] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        misdeed = self.server.misdeeds.pop(0) if self.server.misdeeds else ""
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        content = self.server.files.get(self.path.lstrip("/"))
        if misdeed.isdigit() or content is None:
            self.send_error(int(misdeed or 404))
            return
        if misdeed.startswith("to "):
            self.send_response(302)
            self.send_header("Location", misdeed.removeprefix("to "))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if misdeed in _FLOODS:
            head, chunk = _FLOODS[misdeed]
            self.wfile.write(b"HTTP/1.1 " + head.replace(b"\n", b"\r\n"))
            self._flood(chunk)
            return
        if misdeed in ("endless", "trickle"):
            self.send_response(200)
            self.end_headers()
            self._flood(b"x" if misdeed == "trickle" else b"x" * (1 << 16))
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if misdeed == "ignore range":
            start = wanted = 0
        start += misdeed == "other range"
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        body = content[start:]
        if misdeed == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if misdeed in ("truncate", "stall"):
            body = body[: len(body) // 2]
        self.wfile.write(body)
        if misdeed == "stall":
            self.wfile.flush()
            self.server.closing.wait(5)

    def _flood(self, chunk: bytes) -> None:
        """Sends for ever, or until the client hangs up."""
        with contextlib.suppress(OSError):
            while not self.server.closing.wait(0.02 if len(chunk) == 1 else 0):
                self.wfile.write(chunk)
                self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def toy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A set `toy` of one gz file."""
    item = Download("data.gz", (server.url,), (("data", EXPECTED),))
    monkeypatch.setitem(DOWNLOADS, "toy", (item,))
    server.files["data.gz"] = PACKED
    return server


def quick(folder: Path, **options: object) -> list[Path]:
    return fetch("toy", folder, patience=QUICK, progress=False, **options)  # type: ignore[arg-type]


def test_a_set_is_fetched_once_and_checked(toy: Server, tmp_path: Path):
    (path,) = quick(tmp_path)
    assert path == tmp_path / "toy" / "data.gz" and path.read_bytes() == PACKED
    assert quick(tmp_path) == [path]
    assert len(toy.ranges) == 1
    assert list(path.parent.iterdir()) == [path]


def test_an_endless_body_is_cut_off(toy: Server, tmp_path: Path):
    toy.misdeeds = ["endless"] * 9
    with pytest.raises(FileError, match=r"more than .* bytes, the limit for this file"):
        quick(tmp_path)
    assert not list((tmp_path / "toy").iterdir())
    toy.misdeeds = []
    assert quick(tmp_path)[0].read_bytes() == PACKED


def test_a_body_that_trickles_ends_at_the_total_time(toy: Server, tmp_path: Path):
    toy.misdeeds = ["trickle"] * 9
    patience = Patience(timeout=5, retries=3, backoff=0.01, total=0.5)
    with pytest.raises(FileError, match="took longer than the total time"):
        fetch("toy", tmp_path, patience=patience, progress=False)
    assert len(toy.ranges) == 1


@pytest.mark.parametrize("misdeed", [*_FLOODS])
def test_whatever_surrounds_a_body_is_limited_too(toy: Server, tmp_path: Path, misdeed: str):
    toy.misdeeds = [misdeed] * 9
    slow = misdeed.startswith("slow")
    patience = Patience(timeout=5, retries=0, total=0.5 if slow else 60)
    why = "took longer than the total time" if slow else "sends more than .* bytes, the limit"
    with pytest.raises(FileError, match=why):
        fetch("toy", tmp_path, patience=patience, progress=False)


def test_a_connection_that_fails_in_any_way_is_tried_again(
    toy: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    errors = [OSError(errno.EHOSTUNREACH, "No route to host"), ssl.SSLError("bad record mac")]
    read = http.client.HTTPResponse.read1

    def failing(response: http.client.HTTPResponse, size: int = -1) -> bytes:
        if errors:
            raise errors.pop()
        return read(response, size)

    monkeypatch.setattr(http.client.HTTPResponse, "read1", failing)
    assert quick(tmp_path)[0].read_bytes() == PACKED


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ftp://127.0.0.1/x", "which is not an http or https address"),
        ("http://[::1/x", "redirects to a malformed address"),
        ("file:///x", "is not allowed"),
    ],
)
def test_only_web_addresses_are_redirected_to(toy: Server, tmp_path: Path, address: str, why: str):
    toy.misdeeds = [f"to {address}"] * 9
    with pytest.raises(FileError, match=why):
        quick(tmp_path)
    assert len(toy.ranges) == 1


@pytest.mark.parametrize(
    "mirror", ["http://[::1", "http://127.0.0.1:999999", "http://a b/", "http://%00/"]
)
def test_a_malformed_mirror_is_refused(toy: Server, tmp_path: Path, mirror: str):
    with pytest.raises(DataError, match="mirror="):
        quick(tmp_path, mirror=mirror)


@pytest.mark.parametrize("end", ["?token=secret", "#secret", "x:secret@h/"])
def test_what_may_be_a_secret_of_a_mirror_is_neither_sent_nor_shown(
    toy: Server, tmp_path: Path, end: str
):
    with pytest.raises(DataError, match=r"a user name or password|a query or fragment") as caught:
        quick(tmp_path, mirror=f"{toy.url}/{end}")
    assert "secret" not in str(caught.value) and not toy.ranges


def test_a_bomb_is_not_unpacked(toy: Server, tmp_path: Path):
    toy.files["data.gz"] = gzip.compress(bytes(100 * len(PLAIN)))
    tracemalloc.start()
    with pytest.raises(FileError, match=r"more than 512,000 bytes uncompressed"):
        quick(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(PLAIN)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_only_unpacks_as_a_whole_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: int
):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        archive.writestr("data", bytes(200 * len(PLAIN)))
    server.files["data.zip"] = packed.getvalue()
    item = Download("data.zip", (server.url,), (("data", EXPECTED),))
    monkeypatch.setitem(DOWNLOADS, "toy", (item,))
    tracemalloc.start()
    with pytest.raises(FileError, match="compressed in another way than by deflate"):
        quick(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * len(PLAIN)


def test_a_part_is_not_written_through_a_symbolic_link(toy: Server, tmp_path: Path):
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "data.gz.part").symlink_to(tmp_path / "precious")
    with pytest.raises(FileError, match="it is a symbolic link: remove it"):
        quick(tmp_path)
    assert (tmp_path / "precious").read_text() == "years of work"


def test_a_part_is_not_written_to_a_pipe(toy: Server, tmp_path: Path):
    (tmp_path / "toy").mkdir()
    os.mkfifo(tmp_path / "toy" / "data.gz.part")
    with pytest.raises(FileError, match="it is a pipe or a device: remove it"):
        quick(tmp_path)


def test_an_archive_of_very_many_members_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("data", PLAIN)
        for number in range(1000):
            archive.writestr(f"{number}", b"")
    server.files["data.zip"] = packed.getvalue()
    monkeypatch.setitem(
        DOWNLOADS, "toy", (Download("data.zip", (server.url,), (("data", EXPECTED),)),)
    )
    with pytest.raises(FileError, match="more than 1,000 members"):
        quick(tmp_path)


def test_an_encrypted_or_damaged_archive_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("data", PLAIN)
    good = packed.getvalue()
    encrypted = bytearray(good)
    encrypted[6] |= 1
    encrypted[good.index(b"PK\x01\x02") + 8] |= 1
    damaged = good[:40] + b"\xff" * 20 + good[60:]
    item = Download("data.zip", (server.url,), (("data", EXPECTED),))
    monkeypatch.setitem(DOWNLOADS, "toy", (item,))
    for content in (bytes(encrypted), damaged, good[: len(good) // 2]):
        server.files["data.zip"] = content
        with pytest.raises(FileError, match="damaged"):
            quick(tmp_path)


@pytest.mark.parametrize("misdeed", ["truncate", "stall"])
def test_an_interrupted_transfer_goes_on_with_a_range(toy: Server, tmp_path: Path, misdeed: str):
    toy.misdeeds = [misdeed]
    (path,) = quick(tmp_path)
    assert path.read_bytes() == PACKED
    assert toy.ranges == [None, f"bytes={len(PACKED) // 2}-"]


def test_a_server_that_ignores_ranges_starts_over(toy: Server, tmp_path: Path):
    toy.misdeeds = ["truncate", "ignore range"]
    assert quick(tmp_path)[0].read_bytes() == PACKED


def test_an_answer_with_another_range_is_not_used(toy: Server, tmp_path: Path):
    toy.misdeeds = ["truncate", "other range"]
    assert quick(tmp_path)[0].read_bytes() == PACKED
    assert toy.ranges == [None, f"bytes={len(PACKED) // 2}-", f"bytes={len(PACKED) // 2}-"]


def test_a_corrupt_transfer_is_thrown_away_and_repeated(toy: Server, tmp_path: Path):
    toy.misdeeds = ["corrupt"]
    assert quick(tmp_path)[0].read_bytes() == PACKED
    assert toy.ranges == [None, None]
    toy.misdeeds = ["truncate", "corrupt", "503"]
    assert quick(tmp_path / "2")[0].read_bytes() == PACKED


def test_retries_are_bounded_and_a_later_call_goes_on(toy: Server, tmp_path: Path):
    toy.misdeeds = ["truncate"] * 4
    with pytest.raises(FileError, match=r"could not download data\.gz .*ended after .*is kept"):
        quick(tmp_path)
    part = tmp_path / "toy" / "data.gz.part"
    kept = part.stat().st_size
    assert len(toy.ranges) == 4 and 0 < kept < len(PACKED)
    quick(tmp_path)
    assert toy.ranges[-1] == f"bytes={kept}-" and not part.exists()


def test_a_file_that_stays_wrong_is_never_stored(toy: Server, tmp_path: Path):
    toy.misdeeds = ["corrupt"] * 4
    with pytest.raises(FileError, match=r"could not download data\.gz"):
        quick(tmp_path)
    toy.files["data.gz"] = gzip.compress(b"x" + PLAIN[1:])
    with pytest.raises(FileError, match=r"data\.gz has sha256 .*another version"):
        quick(tmp_path)
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_part_that_is_complete_or_too_long_is_settled(toy: Server, tmp_path: Path):
    part = tmp_path / "toy" / "data.gz.part"
    part.parent.mkdir()
    part.write_bytes(PACKED)
    assert quick(tmp_path)[0].read_bytes() == PACKED
    (tmp_path / "toy" / "data.gz").unlink()
    part.write_bytes(PACKED + b"more")
    assert quick(tmp_path)[0].read_bytes() == PACKED


def test_a_refusal_is_not_repeated_and_the_next_address_is_tried(
    toy: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bases = (f"{toy.url}/gone", toy.url)
    item = Download("data.gz", bases, (("data", EXPECTED),))
    monkeypatch.setitem(DOWNLOADS, "toy", (item,))
    assert quick(tmp_path)[0].read_bytes() == PACKED
    assert len(toy.ranges) == 2
    with pytest.raises(FileError, match=r"gone/data\.gz: HTTP 404 .*mirror="):
        quick(tmp_path / "2", mirror=f"{toy.url}/gone/")
    assert len(toy.ranges) == 3


def test_unreachable_and_foreign_addresses(toy: Server, tmp_path: Path):
    with pytest.raises(FileError, match=r"127\.0\.0\.1:1/data\.gz: .*refused"):
        quick(tmp_path, mirror="http://127.0.0.1:1")
    with pytest.raises(DataError, match="is not an http or https address"):
        quick(tmp_path, mirror="file:///etc")


def test_a_damaged_file_in_place_is_named_not_overwritten(toy: Server, tmp_path: Path):
    path = tmp_path / "toy" / "data"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    with pytest.raises(FileError, match=r"data has 4 bytes .*remove it and fetch toy once more"):
        quick(tmp_path)
    assert path.read_bytes() == b"mine" and toy.ranges == []


def test_a_folder_that_cannot_be_written(toy: Server, tmp_path: Path):
    (tmp_path / "toy").write_text("a file where the folder should be")
    with pytest.raises(FileError, match=r"cannot write .*data\.gz\.part"):
        quick(tmp_path)
    assert len(toy.ranges) == 1


def archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(f"folder/{name}", content)
    return buffer.getvalue()


def encrypted(content: bytes) -> bytes:
    """An archive whose members claim to be encrypted."""
    data = bytearray(content)
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(mark) + flags] |= 1
    return bytes(data)


def broken(compression: int) -> bytes:
    """An archive whose compressed content is damaged."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("data", PLAIN * 50)
    data = bytearray(buffer.getvalue())
    data[data.find(b"data") + 13 : data.find(b"PK\x01\x02")] = b"\xff" * (
        data.find(b"PK\x01\x02") - data.find(b"data") - 13
    )
    return bytes(data)


def test_archives_give_their_checked_members(
    toy: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    item = Download("all.zip", (toy.url,), (("data", EXPECTED),))
    monkeypatch.setitem(DOWNLOADS, "toy", (item,))
    toy.files["all.zip"] = archive(data=PLAIN, licence=b"free")
    (path,) = quick(tmp_path)
    assert path == tmp_path / "toy" / "data" and path.read_bytes() == PLAIN
    for content, why in [
        (archive(licence=b"free"), "the archive has no data"),
        (b"<html>not a zip</html>", "the archive with data is damaged"),
        (archive(data=PLAIN + b"longer"), "data in all.zip has"),
        (encrypted(archive(data=PLAIN)), "damaged or encrypted"),
        (broken(zipfile.ZIP_DEFLATED), "damaged or encrypted"),
        (broken(zipfile.ZIP_LZMA), "damaged or encrypted"),
        (broken(zipfile.ZIP_BZIP2), "damaged or encrypted"),
    ]:
        toy.files["all.zip"] = content
        with pytest.raises(FileError, match=why):
            quick(tmp_path / "2")


def test_the_bar_shows_on_request(toy: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    fetch("toy", tmp_path, patience=QUICK)
    assert "data.gz: 100%" in capsys.readouterr().err


def test_waits_double_and_are_bounded(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    monkeypatch.setattr(download_module.time, "sleep", waits.append)
    for attempt in (0, 1, 2, 10):
        Patience().wait(attempt)
    assert waits == [1.0, 2.0, 4.0, 30.0]


@pytest.mark.parametrize("name", ["ptb", "ptb-char"])
def test_licensed_sets_say_where_they_come_from(name: str, tmp_path: Path):
    with pytest.raises(DataError, match=r"Linguistic Data Consortium .*LDC99T42.*into DIR/ptb"):
        fetch(name, tmp_path)


def test_loading_never_fetches(toy: Server, tmp_path: Path):
    with pytest.raises(FileError, match="afterdrop data fetch wikitext-2"):
        load("wikitext-2", tmp_path)
    assert toy.ranges == []


def test_mnist_as_published_passes_the_table(real_data: Path, server: Server, tmp_path: Path):
    for path in (real_data / "mnist").glob("*.gz"):
        server.files[path.name] = path.read_bytes()
    paths = fetch("mnist", tmp_path, mirror=server.url, patience=QUICK, progress=False)
    assert len(paths) == 4
    assert len(load("mnist", tmp_path).test.labels) == 10_000  # type: ignore[union-attr]
