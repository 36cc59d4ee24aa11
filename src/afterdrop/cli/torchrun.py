"""Commands that torchrun starts as several processes: their group, their devices, their end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

# Its functions keep the group there is when torch happens to import them, as a default. A group
# that is held outlives the interpreter, and its threads then abort the process.
import torch.distributed.nn.functional
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from afterdrop.errors import RankError, RankLost
from afterdrop.ranks import TIMEOUT, Ranks, Splitting, current
from afterdrop.train.device import choose_device


def launched() -> bool:
    """Whether torchrun (or what sets the same variables) started this process among others.

    Example:
        >>> launched()
        False
    """
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def speaks() -> bool:
    """Whether this process is the one of a command that shows its results: rank 0, or alone.

    Example:
        >>> speaks()
        True
    """
    return not launched() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def process_group(device: str) -> Iterator[Splitting | None]:
    """The process group of a command that torchrun started; None in a process of its own.

    Args:
        device: Where the command computes, as `rank_device` says.
    """
    if not launched():
        yield None
        return
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    try:
        store, rank, count = next(rendezvous("env://"))
        # After a restart (--max-restarts) the store still holds where the old ranks were.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot join the others at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {error}; check that "
            "every host can reach it"
        ) from error
    with _termination():
        yield "split"
    # Not after an error: a group that lost a rank would wait for it.
    _leave()


def _leave() -> None:
    """Ends the process group when all ranks have come here.

    A rank that closes its connections early can fail what another one has sent but not yet looked
    back at. Whoever comes here has nothing to look back at, so a failure here means nothing.
    """
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.zeros(1))
    dist.destroy_process_group()


@contextlib.contextmanager
def _termination() -> Iterator[None]:
    """SIGTERM, by which torchrun ends all ranks when one is gone, as an error: work is kept."""

    def lost(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        raise RankLost(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} was told to end (SIGTERM): "
            "another rank has ended, or the job was stopped"
        )

    before = signal.signal(signal.SIGTERM, lost)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def rank_device(device: str | None) -> str:
    """The device of this rank: of several GPUs of a host, the one with the rank's local number.

    Args:
        device: As the user gave it; None is a GPU if there is one.

    Raises:
        ConfigError: If there is no such device.
        RankError: If there are fewer GPUs than ranks on this host.

    Example:
        >>> rank_device("cpu")
        'cpu'
    """
    chosen = str(choose_device(device))
    if chosen != "cuda" or not launched():
        return chosen
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= found:
        raise RankError(
            f"local rank {local} has no GPU: this host has {found}; start at most {found} ranks on "
            "it (--nproc-per-node), or give --device cpu"
        )
    torch.cuda.set_device(local)
    return f"cuda:{local}"


@contextlib.contextmanager
def shared_evaluation(device: str | None, parts: Path) -> Iterator[tuple[str, Ranks]]:
    """The device of this rank, and the ranks of the command; one process is alone.

    Args:
        device: As the user gave it; None is a GPU if there is one.
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
