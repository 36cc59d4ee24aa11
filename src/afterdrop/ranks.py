"""Processes that share one piece of work: which one this is, and how they communicate.

`torchrun` starts several processes, the ranks, and torch.distributed connects them. All of them
run the same program, so every decision that depends on files, clocks or signals is made here for
all of them: rank 0 reads and broadcasts, and a stop requested by any rank stops all of them.
`SINGLE_PROCESS` stands for a program that runs without torchrun; with it nothing communicates.

Only tensors, and JSON as bytes, are sent: nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from afterdrop.errors import AfterdropError, RankError, RankLost, StoppedElsewhere
from afterdrop.rank_watch import VARIABLE, RankWatch, give_up_after, named
from afterdrop.stop_request import pending_stop

Splitting = Literal["split"]
_Value = TypeVar("_Value")
_INTERVAL = timedelta(seconds=0.2)
_STOP_AFTER = 20.0  # seconds after a signal; torchrun kills a rank after 30, without a word


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among those that share the work.

    Attributes:
        rank: Its number, 0 to count − 1.
        count: The number of processes.
        cpu_group: The process group for tensors on the CPU; None is the default group.
        watch: Says which ranks this one is waiting for; None for a single process.

    Example:
        >>> Ranks(rank=1, count=3).share(8)
        slice(2, 5, None)
        >>> SINGLE_PROCESS.from_rank0(lambda: "called here"), SINGLE_PROCESS.max(2)
        ('called here', 2)
    """

    rank: int = 0
    count: int = 1
    cpu_group: Any = None
    watch: RankWatch | None = dataclasses.field(default=None, compare=False)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which reads and writes files and prints for all ranks."""
        return self.rank == 0

    def share(self, total: int) -> slice:
        """This rank's contiguous share of `total` rows; shares differ by at most one row."""
        return slice(self.rank * total // self.count, (self.rank + 1) * total // self.count)

    def max(self, number: int) -> int:
        """The largest of the numbers that the ranks give."""
        if self.count == 1:
            return number
        largest = torch.tensor(number)
        self._communicate(largest, dist.all_reduce, largest, dist.ReduceOp.MAX)
        return int(largest)

    def sum(self, tensor: Tensor) -> Tensor:
        """Replaces each rank's tensor by the sum over ranks, bit-identical on all of them."""
        if self.count > 1:
            self._communicate(tensor, dist.all_reduce, tensor)
        return tensor

    def gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, in order of rank; their shapes must agree."""
        if self.count == 1:
            return [tensor]
        own = tensor.detach().contiguous()
        found = [torch.empty_like(own) for _ in range(self.count)]
        self._communicate(own, dist.all_gather, found, own)
        return found

    def from_rank0(self, call: Callable[[], _Value]) -> _Value:
        """Calls `call` on rank 0 only and returns its JSON-serialisable result on every rank.

        Raises:
            AfterdropError: On rank 0, if `call` raises it.
            StoppedElsewhere: In that case on every other rank, with the same message.
        """
        if self.count == 1:
            return call()
        if not self.first:
            answer = self.gather(None)[0]
            if "error" in answer:
                raise StoppedElsewhere(f"rank 0 stopped: {answer['error']}")
            return answer["value"]
        try:
            value = call()
        except AfterdropError as error:
            self.gather({"error": str(error)})
            raise
        self.gather({"value": value})
        return value

    def enter_on_rank0(self, held: ExitStack, context: AbstractContextManager[Any]) -> None:
        """Enters a context, such as a lock, on rank 0 only, until `held` is closed.

        Raises:
            AfterdropError: As `from_rank0`, if the context raises it.
        """

        def enter() -> None:
            held.enter_context(context)

        self.from_rank0(enter)

    def gather(self, value: Any) -> list[Any]:
        """The JSON-serialisable values of all ranks, in order of rank."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        texts = [
            self._broadcast(own if rank == self.rank else None, (torch.uint8, size.tolist()), rank)
            for rank, size in enumerate(self.gather_rows(torch.tensor([len(own)])))
        ]
        return [json.loads(bytes(text.tolist())) for text in texts]

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        """Yields each name with the tensors of the ranks that have it, in order of rank.

        The tensors are on the CPU. They are sent one name at a time, so that no rank holds two
        copies of everything.
        """
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        listed = self.gather([[n, str(t.dtype)[6:], list(t.shape)] for n, t in own.items()])
        kinds = [
            {n: (getattr(torch, dtype), shape) for n, dtype, shape in entries} for entries in listed
        ]
        for name in dict.fromkeys(name for kind in kinds for name in kind):
            yield (
                name,
                [
                    self._broadcast(own.get(name) if rank == self.rank else None, kind[name], rank)
                    for rank, kind in enumerate(kinds)
                    if name in kind
                ],
            )

    def tensors_from_rank0(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of rank 0, on every rank; the arguments of other ranks are ignored."""
        sent = self.gather_tensors(tensors if self.first else {})
        return {name: parts[0] for name, parts in sent}

    def _broadcast(
        self, mine: Tensor | None, kind: tuple[Any, Sequence[int]], source: int
    ) -> Tensor:
        """The tensor of the rank `source`, on every rank."""
        tensor = torch.empty(kind[1], dtype=kind[0]) if mine is None else mine
        if self.count > 1 and tensor.numel():
            self._communicate(tensor, dist.broadcast, tensor, group_src=source)
        return tensor

    def _communicate(
        self, tensor: Tensor, operation: Callable[..., Any], *inputs: Any, **options: Any
    ) -> None:
        """Runs a collective operation of torch.distributed on this rank.

        Args:
            tensor: One of its tensors, which are all on the same device.
            operation: `dist.all_reduce` or another one.
            inputs: Its arguments.
            options: Its keyword arguments, except for the group.
        """
        on_cpu = tensor.device.type == "cpu"
        start = time.monotonic()
        try:
            with nullcontext() if self.watch is None else self.watch.waiting():
                group = self.cpu_group if on_cpu else None
                work = operation(*inputs, **options, group=group, async_op=on_cpu)
                if on_cpu:
                    self._wait(work)
        except RankLost:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if self.watch is not None and self.watch.gave_up(time.monotonic() - start):
                raise RankLost(
                    f"rank {self.rank} of {self.count} has waited "
                    f"{time.monotonic() - start:.0f} s for {self._missing()}, and gives up "
                    f"({VARIABLE} sets the time): {reason}"
                ) from error
            raise RankLost(
                f"rank {self.rank} of {self.count} lost the others: one of them has ended, or its "
                f"host cannot be reached ({reason})"
            ) from error

    def _wait(self, work: Any) -> None:
        """Waits for an operation in short intervals, between which Python handles signals.

        Within one long wait it would not, and gloo does not always notice that a rank has died: a
        rank would ignore the SIGTERM that torchrun then sends to it.
        """
        start = time.monotonic()
        while not _is_done(work):
            request = pending_stop()
            if request is None:
                continue
            waited = time.monotonic() - max(start, request.since)
            if waited > min(_STOP_AFTER, give_up_after().total_seconds() / 2):
                raise RankLost(
                    f"rank {self.rank} of {self.count} received {request.signal} and has waited "
                    f"{waited:.0f} s for {self._missing()} since"
                )

    def _missing(self) -> str:
        missing = [] if self.watch is None else self.watch.missing()
        return f"{named(missing)}, which may be stopped or hanging" if missing else "the others"


def _is_done(work: Any) -> bool:
    """Waits a little for an operation; raises its error if it has failed."""
    try:
        work.wait(_INTERVAL)
    except RankLost:  # of the handler of a signal
        raise
    except RuntimeError:  # its own error, or that the time is over
        pass
    if work.is_completed():
        work.wait()
        return True
    return False


SINGLE_PROCESS = Ranks()


def current(ranks: Splitting | None) -> Ranks:
    """The ranks of a library call: the caller's process group if requested, else this process.

    Args:
        ranks: "split" to split the work over the caller's process group, or None.

    Raises:
        RankError: If there is no process group.

    Example:
        >>> current(None) == SINGLE_PROCESS
        True
        >>> current("split")
        Traceback (most recent call last):
        afterdrop.errors.RankError: ranks='split' needs a process group and there is none; start \
with torchrun and call torch.distributed.init_process_group(), or leave ranks out
    """
    if ranks is None:
        return SINGLE_PROCESS
    if ranks != "split":
        raise RankError(f"ranks={ranks!r} must be 'split' or None")
    if not (dist.is_available() and dist.is_initialized()):
        raise RankError(
            "ranks='split' needs a process group and there is none; start with torchrun and call "
            "torch.distributed.init_process_group(), or leave ranks out"
        )
    # NCCL cannot send tensors that are on the CPU; without gloo, a second group sends them.
    has_gloo = "gloo" in dist.get_backend_config()
    cpu_group = None if has_gloo else dist.new_group(None, give_up_after(), "gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, count, cpu_group, _watch(rank, count) if count > 1 else None)


_WATCHES: dict[int, RankWatch] = {}  # one for each process group, by the identity of its store


def _watch(rank: int, count: int) -> RankWatch:
    store = dist.distributed_c10d._get_default_store()
    if id(store) not in _WATCHES:
        for old in _WATCHES.values():
            old.close()
        _WATCHES.clear()
        _WATCHES[id(store)] = RankWatch(store, rank, count, give_up_after().total_seconds())
    return _WATCHES[id(store)]
