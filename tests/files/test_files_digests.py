"""Files carry digests: what was written is read back, and anything else is refused."""

import errno
import json
import multiprocessing
import os
import signal
import stat
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from afterdrop import file_locks
from afterdrop.errors import DamagedError, FileError
from afterdrop.evaluation import part_files
from afterdrop.file_locks import file_lock, remove_unlocked, sole_lock, take
from afterdrop.files import (
    TEMPORARY,
    read_json,
    sealed,
    write_atomic,
    write_json,
    written_atomically,
)
from afterdrop.tensor_files import read_note, read_tensors, write_tensors

WITHIN_64_BITS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | WITHIN_64_BITS | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BARE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TENSORS = {
    "b": torch.arange(6.0).reshape(2, 3).bfloat16(),
    "a": torch.randn(3, 4, dtype=torch.float64),
    "empty": torch.zeros(0, 2),
    "scalar": torch.tensor(7),
    "yes": torch.tensor([True, False, True]),
    "view": torch.arange(8, dtype=torch.int32)[::2],
}


@BARE
@given(content=st.dictionaries(st.sampled_from(["a", "b", "é"]), VALUES))
def test_json_is_read_back(tmp_path, content):
    write_json(tmp_path / "x.json", "kind", 1, content)
    assert read_json(tmp_path / "x.json", "kind", 1) == json.loads(json.dumps(content))


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, "\ud800", {1, 2}])
def test_nothing_is_written_that_cannot_be_read(tmp_path, value):
    for path, write in (
        (tmp_path / "x.json", lambda path, content: write_json(path, "kind", 1, content)),
        (tmp_path / "x.safetensors", lambda path, content: write_tensors(path, TENSORS, content)),
    ):
        write(path, {"a": 1})
        before = path.read_bytes()
        with pytest.raises(FileError, match="cannot be stored as JSON"):
            write(path, {"a": value})
        assert path.read_bytes() == before


def test_a_changed_value_is_noticed(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, "kind", 1, {"gain": 0.0127})
    path.write_text(path.read_text().replace("0.0127", "0.1370"))
    with pytest.raises(DamagedError, match=r"x\.json does not match its digest.*create it again"):
        read_json(path, "kind", 1)
    path.write_text('{"kind": "kind", "version": 1}')
    with pytest.raises(DamagedError, match=r"has no digest.*older afterdrop"):
        read_json(path, "kind", 1)


def test_tensors_are_read_back_here_and_by_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"step": 7})
    found, note = read_tensors(path)
    assert note == read_note(path) == {"step": 7}
    for read in (found, load_file(path)):
        assert read.keys() == TENSORS.keys()
        assert all(torch.equal(read[name], TENSORS[name]) for name in TENSORS)
        assert all(read[name].dtype == TENSORS[name].dtype for name in TENSORS)


@BARE
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_every_flipped_bit_of_a_tensor_file_is_noticed(tmp_path, at, bit):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"step": 7})
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)
    try:
        found, note = read_tensors(path)
    except FileError as error:
        assert "x.safetensors" in str(error)
    else:  # a space between header and payload became another white space
        assert note == {"step": 7} and torch.equal(found["a"], TENSORS["a"])


@pytest.mark.parametrize("entry", [{"shape": [10**12]}, {"shape": "x"}, {"data_offsets": [0, 9]}])
def test_a_header_that_does_not_fit_the_payload_is_refused(tmp_path, entry):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": torch.zeros(4)}, {})
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    metadata = header.pop("__metadata__")
    metadata.pop("digest")
    header["a"] |= entry
    metadata["digest"] = sealed({"__metadata__": metadata, **header})["digest"]
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    with pytest.raises(DamagedError, match="header is wrong"):
        read_tensors(path)


def test_pieces_are_written_as_one_tensor(tmp_path):
    for dtype in (torch.float32, torch.int64):
        whole = torch.arange(24).reshape(2, 3, 4).to(dtype)
        write_tensors(tmp_path / "whole", {"a": whole, "b": whole[0, 0]}, {})
        pieces = list(whole.split([1, 0, 3], -1))
        write_tensors(tmp_path / "pieces", {"a": pieces, "b": whole[0, 0]}, {})
        assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


def test_saving_takes_no_second_copy(tmp_path):
    tensors = {"a": torch.ones(2_000_000)}  # 8 MB
    tracemalloc.start()
    write_tensors(tmp_path / "x", tensors, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# Writers that are killed


def _killed(path):
    with written_atomically(path) as file:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(tmp_path / "x",))
    process.start()
    process.join()
    assert len(list(tmp_path.iterdir())) == 1  # a temporary file
    with written_atomically(tmp_path / "y") as other:  # a writer at work is left alone
        other.write(b"other")
        write_atomic(tmp_path / "x", b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]
    assert (tmp_path / "x").read_bytes() == b"new" and (tmp_path / "y").read_bytes() == b"other"


def test_temporary_files_of_other_programs_are_left_alone(tmp_path):
    for name in (".notes.tmp", ".syncthing.page.html.tmp"):
        (tmp_path / name).write_text("of another program")
    write_atomic(tmp_path / "page.html", b"new")
    assert len(list(tmp_path.iterdir())) == 3


def test_an_error_while_writing_leaves_the_old_file(tmp_path):
    write_atomic(tmp_path / "x", b"old")
    with pytest.raises(KeyboardInterrupt), written_atomically(tmp_path / "x") as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


@pytest.mark.skipif(file_locks.fcntl is None, reason="needs file locks")
def test_a_lock_that_fails_is_named(tmp_path, monkeypatch):
    def fails(file, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_locks.fcntl, "flock", fails)
    with (
        pytest.raises(
            FileError, match=r"cannot lock .*x\.lock: .*Input/output error.*use a folder"
        ),
        sole_lock(tmp_path / "x.lock"),
    ):
        raise AssertionError("locked")


def test_a_lock_survives_that_its_folder_is_removed(tmp_path, monkeypatch):
    """Ranks that have saved remove their folders of parts together."""
    real, opened = file_locks.in_place, []

    def after_removal(path, flags):
        if not opened:
            Path(path).parent.rmdir()
        opened.append(path)
        return real(path, flags)

    monkeypatch.setattr(file_locks, "in_place", after_removal)
    with sole_lock(tmp_path / "parts" / "lock"):
        assert (tmp_path / "parts" / "lock").exists()
    assert len(opened) == 2


def test_parts_that_another_rank_removes_at_the_same_time_are_no_error(tmp_path, monkeypatch):
    def gone(path):
        raise FileNotFoundError(path)

    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(part_files, "make_folder", gone)
    part_files.remove_parts(tmp_path / "parts")


def test_a_lock_is_for_one_and_survives_a_killed_holder(tmp_path):
    path = tmp_path / "lock"
    path.write_text("")  # the file of a process that was killed
    with sole_lock(path):
        with pytest.raises(BlockingIOError), sole_lock(path):
            pass
        assert path.exists()
    assert not path.exists()


def test_a_pipe_in_the_place_of_a_lock_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "lock")
    for lock in (sole_lock, file_lock):
        with pytest.raises(OSError, match="lock"), lock(tmp_path / "lock"):
            pass


def test_a_pipe_in_the_place_of_a_temporary_file_does_not_block(tmp_path):
    os.mkfifo(tmp_path / f".x.0123abcd{TEMPORARY}")
    write_atomic(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises(FileError, match="device or a pipe"):
            write_atomic(tmp_path / name, b"content")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def hostile(path, change):
    """Changes the header of a file of tensors, and gives it the right digest again."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:size])
    del header["__metadata__"]["digest"]
    change(header)
    header["__metadata__"]["digest"] = sealed(header)["digest"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[size:])


HOSTILE = {
    "a note that is a number": lambda header: header["__metadata__"].update(afterdrop=5),
    "a note that is a list": lambda header: header["__metadata__"].update(afterdrop="[]"),
    "no digest of the payload": lambda header: header["__metadata__"].pop("payload"),
    "a float": lambda header: header["x"].update(shape=[6.0]),
    "a truth value": lambda header: header["x"].update(shape=[True, 6]),
    "two negative sizes": lambda header: header["x"].update(shape=[-1, -1, 6]),
    "an empty tensor with large strides": lambda header: header["none"].update(
        shape=[0, 2**62, 2**62]
    ),
    "many dimensions": lambda header: header["x"].update(shape=[1] * 100 + [6]),
    "a text": lambda header: header["x"].update(shape="6"),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_header_with_the_right_digest_is_refused(tmp_path, change):
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.arange(6.0), "none": torch.zeros(0)}, {"kind": "x"})
    hostile(path, lambda header: None)
    read_tensors(path)
    hostile(path, HOSTILE[change])
    with pytest.raises(DamagedError, match="is damaged, or not a file of afterdrop"):
        read_tensors(path)


def test_a_temporary_file_is_locked_while_it_is_removed(tmp_path, monkeypatch):
    """Otherwise a process that has just created it could take the lock in between."""
    path, unlink = tmp_path / ".x.json.abc.afterdrop.tmp", Path.unlink
    path.touch()

    def removing(path):
        with open(path, "rb") as file, pytest.raises(BlockingIOError):
            take(file)
        unlink(path)

    monkeypatch.setattr(Path, "unlink", removing)
    remove_unlocked(path)
    assert not path.exists()


# Permissions and file systems


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_file_has_the_permissions_that_the_user_gave(tmp_path):
    path, before = tmp_path / "x", os.umask(0o077)
    try:
        write_atomic(path, b"private")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        os.umask(0o002)
        write_atomic(tmp_path / "shared", b"for the group")
        assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o664
        write_atomic(path, b"still private")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_what_a_file_replaces_may_be_removed_after_a_power_cut(tmp_path, monkeypatch):
    """Its content is on the disk before it has its name, and its name before the call returns."""
    events, fsync, replace = [], os.fsync, os.replace
    kinds = {stat.S_IFREG: "sync file", stat.S_IFDIR: "sync folder"}

    def synced(handle):
        events.append(kinds[stat.S_IFMT(os.fstat(handle).st_mode)])
        fsync(handle)

    def replaced(*names):
        events.append("rename")
        replace(*names)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    write_atomic(tmp_path / "x", b"new")
    assert events == ["sync file", "rename", "sync folder"]


def test_file_systems_without_locks_can_be_written_to(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def unsupported(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / ".x.0123abcd.afterdrop.tmp").write_bytes(b"perhaps of a writer at work")
    write_atomic(tmp_path / "x", b"new")
    with sole_lock(tmp_path / "lock"):
        assert (tmp_path / "lock").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.0123abcd.afterdrop.tmp", "x"]
    with pytest.raises(FileError, match="with file locks"), file_lock(tmp_path / "shared"):
        pass
