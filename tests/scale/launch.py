"""Starts real ranks as a user does, with torchrun, and finds them to kill them."""

import os
import subprocess
import sys
from pathlib import Path


def command(*arguments: str, ranks: int = 2) -> list[str]:
    """What a user types as `torchrun --nproc-per-node RANKS ...`, with a free port of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), *arguments]


def environment(**more: str) -> dict[str, str]:
    """One thread per rank, and gloo on 127.0.0.1 whatever the host's name resolves to."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def torchrun(*arguments: str, ranks: int = 2, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs ranks to their end."""
    return subprocess.run(
        command(*arguments, ranks=ranks),
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
    )


def pid_of_rank(rank: int, launcher: int) -> int:
    """The process of a rank among the children of the launcher (Linux)."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in variables:
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")
