"""`fetch` against a real server that truncates, corrupts, ignores Range, refuses and stalls."""

import gzip
import hashlib
import io
import threading
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
    with pytest.raises(FileError, match="is not an http or https address"):
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
