"""Process group, device and termination of commands that torchrun starts as several ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

# Imported before a group exists: its functions take the current group as a default argument. A
# group that is still referenced outlives the interpreter, and its threads then abort the process.
import torch.distributed.nn.functional
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from afterdrop.errors import RankError, RankLost
from afterdrop.rank_watch import give_up_after, joining
from afterdrop.ranks import Ranks, Splitting, current
from afterdrop.stop_request import signals_raise
from afterdrop.train import choose_device


def launched() -> bool:
    """Whether torchrun (or a launcher with the same variables) started this process with others.

    Example:
        >>> launched()
        False
    """
    size = os.environ.get("WORLD_SIZE", "1")  # templates of containers leave it empty
    return "RANK" in os.environ and size.isdecimal() and int(size) > 1


def speaks() -> bool:
    """Whether this process prints the results of the command: rank 0, or a single process.

    Example:
        >>> speaks()
        True
    """
    return not launched() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def process_group(device: str) -> Iterator[Splitting | None]:
    """Joins the process group of a command that torchrun started; None for a single process.

    Args:
        device: The device of this rank, from `rank_device`.
    """
    if not launched():
        yield None
        return
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    try:
        store, rank, count = next(rendezvous("env://"))
        # After a restart (--max-restarts) the store still holds the addresses of the old ranks.
        store = PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        with joining(store, rank, count):
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=count, timeout=give_up_after()
            )
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} cannot join the others at "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {error}; check that "
            "every host can reach it"
        ) from error
    with signals_raise(_terminated, [signal.SIGTERM]):
        yield "split"
    # Not in a finally block: after an error, the group would wait for the rank that it lost.
    _leave()


def _leave() -> None:
    """Destroys the process group once all ranks have arrived.

    A rank that closes its connections early can make another rank's pending operations fail. No
    rank has pending operations here, so a failure of this barrier itself can be ignored.
    """
    with contextlib.suppress(RankLost):
        current("split").max(0)
    dist.destroy_process_group()


def end_rank(status: int) -> int:
    """The exit status of a command; a rank that failed ends here instead.

    A process group waits for its operations when Python destroys it, so that a rank whose
    operation can never finish would not end.
    """
    if launched() and status != 0:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed
                stream.flush()
        os._exit(status)
    return status


def _terminated(name: str) -> RankLost:
    """What SIGTERM means, which torchrun sends when a rank has ended."""
    return RankLost(
        f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} received {name}: "
        "another rank has ended, or the job was stopped"
    )


def rank_device(device: str | None) -> str:
    """The device of this rank; on a host with several GPUs, the one with the rank's local number.

    Args:
        device: The user's choice; None is a GPU if there is one.

    Raises:
        ConfigError: If the device does not exist.
        RankError: If this host has fewer GPUs than ranks.

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
    """Yields the device of this rank and the ranks of the command, which may be one.

    Args:
        device: The user's choice; None is a GPU if there is one.
        parts: Folder of finished parts.

    Raises:
        RankLost: If another rank has ended; the message names the folder of finished parts.
    """
    where = rank_device(device)
    try:
        with process_group(where) as ranks:
            yield where, current(ranks)
    except RankLost as error:
        raise RankLost(
            f"{error}. Finished parts are kept in {parts}; run the same command to resume."
        ) from error
