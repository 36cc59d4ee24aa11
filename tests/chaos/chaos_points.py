"""Crash points: before and after each call that makes a write durable or removes a file."""

import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import torch

from afterdrop import files

CRASHED = 77  # exit status of a process that ended at a crash point
_ROOM = 20  # points from which at least two more crashes of up to _SOON points follow
_SOON = 6


def at_each_point(do: Callable[[str], object]) -> None:
    """Makes this process call `do` at each crash point, with a name of the call and its file."""

    def watched(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            name = _name(real, arguments[-1])
            do(name)
            result = real(*arguments, **options)
            do(name)
            return result

        return call

    os.fsync, os.replace, os.unlink = watched(os.fsync), watched(os.replace), watched(os.unlink)
    files._open_temporary = watched(files._open_temporary)


def _name(real: Callable[..., object], file: object) -> str:
    """Such as `replace last.safetensors`; without numbers, so that all parts have one name."""
    name = "" if isinstance(file, int) else Path(str(file)).name
    return f"{real.__name__} {re.sub(r'[0-9]+', '', name)}"


def crash_at(point: int) -> None:
    """Ends this process at a crash point, counted from 1, without any cleaning up."""
    left = point

    def count(name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os._exit(CRASHED)

    at_each_point(count)


def choose_points(names: list[str], count: int) -> list[tuple[int, ...]]:
    """For each of `count` runs the points at which it crashes: at one, or at three in a row.

    A fifth of the runs crash three times, and so do all that are left when every point has had its
    run.

    Args:
        names: The names of the points of an uninterrupted run.
        count: The number of runs.
    """
    single = min(count - count // 5, len(names))
    return [*((point,) for point in _single(names, single)), *_triple(len(names), count - single)]


def _single(names: list[str], count: int) -> list[int]:
    """Different points: one for each name, others spread evenly, and the last ones.

    Those for the names are the later in a run the later their name first occurs.
    """
    places: dict[str, list[int]] = {}
    for point, name in enumerate(names, start=1):
        places.setdefault(name, []).append(point)
    chosen = {some[at * len(some) // len(places)] for at, some in enumerate(places.values())}
    spread = torch.linspace(1, len(names), max(0, count - len(chosen) - 1))
    chosen |= set(spread.round().int().tolist())
    for point in range(len(names), 0, -1):
        if len(chosen) < count:
            chosen.add(point)
    assert len(chosen) == count, f"{count} crashes are too few for {len(places)} kinds of points"
    return sorted(chosen)


def _triple(total: int, count: int) -> list[tuple[int, ...]]:
    """First points spread evenly over all that leave room for two more soon after resuming."""
    rng = random.Random(2)
    first = torch.linspace(1, total - _ROOM, count + 2).round().int().tolist()[1:-1]
    return [(point, rng.randint(1, _SOON), rng.randint(1, _SOON)) for point in first]
