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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from file_kinds import KINDS, copy_sample, damage

import afterdrop as ad
from afterdrop.errors import AfterdropError

COUNT = int(os.environ.get("AFTERDROP_FUZZ", "115"))
CPU_SECONDS = 20.0  # a file that takes a second on a slow machine is a hundred times too slow
MEMORY = 1 << 30


@contextmanager
def ceilings() -> Iterator[None]:
    """Turns more than 1 GiB of new memory and more than 20 s of CPU time into exceptions."""

    def expired(number: int, frame: object) -> None:
        raise TimeoutError(f"took more than {CPU_SECONDS:g} s of CPU time")

    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, expired)
    if sys.platform.startswith("linux"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("name", KINDS)
def test_an_intact_file_is_read(name, samples, tmp_path):
    """So what the test below sees refused is refused because of its damage."""
    KINDS[name].read(copy_sample(KINDS[name], samples, tmp_path))


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_read_or_refused_by_name(name, samples, tmp_path):
    refused = 0
    for number in range(COUNT):
        place = tmp_path / str(number)
        place.mkdir()
        folder = damage(KINDS[name], samples, place, number)
        try:
            with warnings.catch_warnings(record=True) as said, ceilings():
                warnings.simplefilter("always", UserWarning)  # of work that is done again
                KINDS[name].read(folder)
            assert all(str(place) in str(warning.message) for warning in said)
        except AfterdropError as error:
            refused += 1
            assert str(place) in str(error), f"{name} {number} does not name the file: {error}"
        except Exception as error:
            raise AssertionError(f"{name} {number}: {type(error).__name__}: {error}") from error
        shutil.rmtree(place)
    # A report never fails for one damaged part: it says what is missing (read_report asserts it).
    assert (refused == 0) == name.startswith("report")


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
