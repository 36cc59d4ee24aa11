"""The folder of an evaluation's finished parts: its files, its lock, and its removal.

An adaptive evaluation has a folder of parts per stage.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from afterdrop.errors import FileError
from afterdrop.file_locks import sole_lock
from afterdrop.files import make_folder, remove_abandoned

_LOCK = ".lock"
_PART = re.compile(r"part-\d+(-rank-\d+)?\.safetensors")
PILOT, MAIN = "pilot", "main"  # stages of an adaptive evaluation


def part_paths(folder: Path) -> list[Path]:
    """The parts in a folder, in the order of their first batches."""
    return sorted(path for path in folder.glob("part-*") if _PART.fullmatch(path.name))


def part_path(folder: Path, first: int, suffix: str = "") -> Path:
    """The file of a part.

    Args:
        folder: The folder.
        first: The number of its first batch, which is in no other part.
        suffix: Tells parts of several ranks apart.
    """
    return folder / f"part-{first:09d}{suffix}.safetensors"


@contextlib.contextmanager
def parts_lock(folder: Path) -> Iterator[None]:
    """Reserves a folder, which is created if necessary, for one evaluation; a killed one frees it.

    Raises:
        FileError: If another evaluation uses the folder, or it cannot be written to.
    """
    make_folder(folder)
    with contextlib.ExitStack() as held:
        held.callback(_remove_empty, folder)
        held.enter_context(_sole_evaluation(folder / _LOCK, folder))
        remove_abandoned(folder)
        yield


@contextlib.contextmanager
def scores_lock(lock: Path, scores: Path) -> Iterator[None]:
    """Reserves a file of scores for one evaluation, from its beginning until they are saved.

    Folders that were created for it and stay empty are removed.

    Args:
        lock: The file of the lock, in the folder of the scores.
        scores: The file of the scores.

    Raises:
        FileError: If another evaluation writes these scores, or the folder cannot be written to.
    """
    made = [folder for folder in (lock.parent, lock.parent.parent) if not folder.exists()]
    make_folder(lock.parent)
    with contextlib.ExitStack() as held:
        for folder in reversed(made):
            held.callback(_remove_empty, folder)
        held.enter_context(_sole_evaluation(lock, scores))
        yield


@contextlib.contextmanager
def _sole_evaluation(lock: Path, into: Path) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(sole_lock(lock))
        except BlockingIOError as error:
            raise FileError(
                f"another process is evaluating into {into}; wait for it, or give another folder "
                "(the command line: another --out or --split)"
            ) from error
        yield


def remove_parts(folder: Path) -> None:
    """Removes all parts once their scores are written, unless another evaluation uses them."""
    stages = (folder / PILOT, folder / MAIN, folder)
    shares = [share for stage in stages for share in stage.glob("rank-*-of-*")]
    for place in (*shares, *stages):  # the shares are of ranks that share the multipliers
        if place.is_dir():
            with contextlib.suppress(OSError), parts_lock(place):  # ranks may do so together
                for path in part_paths(place):
                    path.unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # what else is in the folder is not ours
        folder.rmdir()
