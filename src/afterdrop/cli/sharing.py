"""Evaluations that torchrun started: the work is shared, and what is finished survives."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from afterdrop.errors import RankLost
from afterdrop.ranks import Ranks, current, process_group, rank_device


@contextmanager
def shared_evaluation(device: str, parts: Path) -> Iterator[tuple[str, Ranks]]:
    """The device of this rank, and the ranks of the command; one process is alone.

    Args:
        device: As the user gave it.
        parts: Where finished parts are kept.

    Raises:
        RankLost: If another rank is gone; says where the finished parts are.
    """
    where = rank_device(device)
    try:
        with process_group(where) as ranks:
            yield where, current(ranks)
    except RankLost as error:
        raise RankLost(
            f"{error}. Finished parts are kept in {parts}. To go on, give the same command again: "
            "it resumes from there."
        ) from error
