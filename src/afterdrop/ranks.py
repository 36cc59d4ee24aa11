"""Processes that work as one: who this one is among them, and how they talk.

`torchrun` starts N processes, the ranks; torch.distributed connects them. All of them run the same
program, so everything that follows from files, clocks or signals is agreed on here: rank 0 reads
and tells, and a wish to stop counts whoever has it. `ALONE` is the one process of a plain call, for
which nothing here communicates.

What is sent is tensors, and JSON as bytes: nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from afterdrop.errors import AfterdropError, RankError, RankLost, StoppedElsewhere

Splitting = Literal["split"]
# A rank that is done waits for the slowest one; a dead one is noticed at once by its connection.
PATIENCE = timedelta(days=1)
_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among those that share the work.

    Attributes:
        rank: Its number, 0 to count − 1.
        count: How many there are.
        words: The group for tensors on the CPU; None is the default group.

    Example:
        >>> Ranks(rank=1, count=3).share(8)
        slice(2, 5, None)
        >>> ALONE.told(lambda: "nobody to tell"), ALONE.most(2)
        ('nobody to tell', 2)
    """

    rank: int = 0
    count: int = 1
    words: Any = None

    @property
    def first(self) -> bool:
        """Whether this is the rank that reads, writes and speaks for all."""
        return self.rank == 0

    def share(self, total: int) -> slice:
        """The contiguous share of this rank in `total` rows, as even as can be."""
        return slice(self.rank * total // self.count, (self.rank + 1) * total // self.count)

    def most(self, number: int) -> int:
        """The largest number that any rank gives."""
        if self.count == 1:
            return number
        largest = torch.tensor(number)
        self._talk(lambda: dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.words))
        return int(largest)

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place of each one's tensor; the same bits everywhere."""
        if self.count > 1:
            self._talk(lambda: dist.all_reduce(tensor, group=self._group(tensor)))
        return tensor

    def gather_rows(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, by rank, which have one shape; on the tensor's device."""
        if self.count == 1:
            return [tensor]
        own = tensor.detach().contiguous()
        found = [torch.empty_like(own) for _ in range(self.count)]
        self._talk(lambda: dist.all_gather(found, own, group=self._group(tensor)))
        return found

    def told(self, call: Callable[[], _Value]) -> _Value:
        """What `call` returns on rank 0, on every rank: a value that JSON can hold.

        Raises:
            AfterdropError: On rank 0, if the call does.
            StoppedElsewhere: Then on the others, with the same words.
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

    def gather(self, value: Any) -> list[Any]:
        """The JSON-friendly values of all ranks, by rank."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        texts = [
            self._sent(own if rank == self.rank else None, (torch.uint8, size.tolist()), rank)
            for rank, size in enumerate(self.gather_rows(torch.tensor([len(own)])))
        ]
        return [json.loads(bytes(text.tolist())) for text in texts]

    def gather_tensors(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
        """Name by name, the tensors of all ranks that have one, by rank, on the CPU.

        One name at a time, so that nobody holds all tensors of all ranks twice.
        """
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        told = self.gather([[n, str(t.dtype)[6:], list(t.shape)] for n, t in own.items()])
        kinds = [
            {n: (getattr(torch, dtype), shape) for n, dtype, shape in entries} for entries in told
        ]
        for name in dict.fromkeys(name for kind in kinds for name in kind):
            yield (
                name,
                [
                    self._sent(own.get(name) if rank == self.rank else None, kind[name], rank)
                    for rank, kind in enumerate(kinds)
                    if name in kind
                ],
            )

    def first_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of rank 0, on every rank; what the others give is not looked at."""
        sent = self.gather_tensors(tensors if self.first else {})
        return {name: parts[0] for name, parts in sent}

    def _sent(self, mine: Tensor | None, kind: tuple[Any, Sequence[int]], source: int) -> Tensor:
        """A tensor that the rank `source` has, on every rank."""
        tensor = torch.empty(kind[1], dtype=kind[0]) if mine is None else mine
        if self.count > 1 and tensor.numel():
            self._talk(lambda: dist.broadcast(tensor, group_src=source, group=self.words))
        return tensor

    def _group(self, tensor: Tensor) -> Any:
        return self.words if tensor.device.type == "cpu" else None

    def _talk(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.count} lost the others: one of them has ended, or its "
                f"host cannot be reached ({str(error).splitlines()[0]})"
            ) from error


ALONE = Ranks()


def current(ranks: Splitting | None) -> Ranks:
    """The ranks of a library call: those of the caller's process group if asked, else this one.

    Args:
        ranks: "split" to share the work over the caller's process group, or None.

    Raises:
        RankError: If there is no process group to share the work in.

    Example:
        >>> current(None) == ALONE
        True
        >>> current("split")
        Traceback (most recent call last):
        afterdrop.errors.RankError: ranks='split' needs a process group and there is none; start \
with torchrun and call torch.distributed.init_process_group(), or leave ranks out
    """
    if ranks is None:
        return ALONE
    if ranks != "split":
        raise RankError(f"ranks={ranks!r} must be 'split' or None")
    if not (dist.is_available() and dist.is_initialized()):
        raise RankError(
            "ranks='split' needs a process group and there is none; start with torchrun and call "
            "torch.distributed.init_process_group(), or leave ranks out"
        )
    # NCCL alone cannot send what lies on the CPU: then a second group does.
    words = None if "gloo" in dist.get_backend_config() else dist.new_group(None, PATIENCE, "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), words)
