"""Damaged files of every kind: each is read rightly or refused with its name, and nothing else.

`make check` and `make test` try 115 damaged files per kind; `make fuzz` tries many more. A file is
drawn by its number, so that a failure names what to repeat: damage(KINDS[kind], ..., number).
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from file_kinds import KINDS, copy_sample, damage

import afterdrop as ad
from afterdrop.errors import AfterdropError

COUNT = int(os.environ.get("AFTERDROP_FUZZ", "115"))
CPU_SECONDS = 20.0  # a file that takes a second on a slow machine is a hundred times too slow
SECONDS = 180  # of waiting, as for the other end of a pipe
MEMORY = 1 << 30
TIMERS = {signal.ITIMER_VIRTUAL: signal.SIGVTALRM, signal.ITIMER_REAL: signal.SIGALRM}


def make_sparse(path: Path) -> None:
    """A file of 1 TiB that takes no space on the disk."""
    path.touch()
    os.truncate(path, 1 << 40)


# Files that other programs write, for which a pipe is as good.
FOREIGN = {"text", "gzip", "xz", "images", "samples", "samples as tensors", "targets"}
# What may lie where a file is expected: an archive may hold all of these.
IMPOSTORS: dict[str, Callable[[Path], None]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a sparse file": make_sparse,
}


@contextmanager
def ceilings() -> Iterator[None]:
    """Fails beyond 1 GiB of new memory, 20 s of CPU time and three minutes of waiting."""

    def expired(number: int, frame: object) -> None:
        # Not an error, which a reader could handle.
        pytest.fail(f"took more than {CPU_SECONDS:g} s of CPU time, or waited {SECONDS} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, expired) for number in TIMERS.values()}
    if sys.platform.startswith("linux"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        for timer in TIMERS:
            signal.setitimer(timer, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", KINDS)
def test_an_intact_file_is_read(name, samples, tmp_path):
    """So what the test below sees refused is refused because of its damage."""
    KINDS[name].read(copy_sample(KINDS[name], samples, tmp_path))


def is_refused(name: str, folder: Path, place: Path) -> bool:
    """Whether a file is refused by name; otherwise it is read, with warnings that name it."""
    try:
        with warnings.catch_warnings(record=True) as said, ceilings():
            warnings.simplefilter("always", UserWarning)  # of work that is done again
            KINDS[name].read(folder)
        assert all(str(place) in str(warning.message) for warning in said)
        return False
    except AfterdropError as error:
        assert str(place) in str(error), f"{name} does not name the file: {error}"
        return True
    except Exception as error:
        raise AssertionError(f"{name} in {place}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_read_or_refused_by_name(name, samples, tmp_path):
    refused = 0
    for number in range(COUNT):
        place = tmp_path / str(number)
        place.mkdir()
        refused += is_refused(name, damage(KINDS[name], samples, place, number), place)
        shutil.rmtree(place)
    # A report never fails for one damaged part: it says what is missing (read_report asserts it).
    assert (refused == 0) == name.startswith("report")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no such files")
@pytest.mark.parametrize("what", IMPOSTORS)
@pytest.mark.parametrize("name", sorted(KINDS.keys() - FOREIGN))
def test_what_is_not_a_file_neither_blocks_nor_fills_the_memory(name, what, samples, tmp_path):
    folder, path = copy_sample(KINDS[name], samples, tmp_path), tmp_path / KINDS[name].file
    path.unlink()
    IMPOSTORS[what](path)
    refused = is_refused(name, folder, tmp_path)
    if name.startswith("report"):
        assert not refused
    elif what in ("a folder", "a pipe", "a device"):
        assert refused


@pytest.mark.parametrize("name", ["configuration", "scores", "choice"])
def test_one_flipped_bit_never_becomes_another_number(name, samples, tmp_path):
    """Whatever a report or a choice shows comes from files that match their digests."""
    kind, rng = KINDS[name], random.Random(0)
    folder = copy_sample(kind, samples, tmp_path)
    path = tmp_path / kind.file
    content = path.read_bytes()
    intact = CONTENT[name](ad.Run.open(folder))
    for _ in range(COUNT):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(AfterdropError):
            assert CONTENT[name](ad.Run.open(folder)) == intact


CONTENT = {
    "configuration": lambda run: (run.config, run.facts),
    "scores": lambda run: [
        run.scores().protocol,
        *((n, t.numpy().tobytes()) for n, t in sorted(run.scores().tensors.items())),
    ],
    "choice": lambda run: str(run.choice),
}
