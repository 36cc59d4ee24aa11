"""Which batches a pilot evaluates: every eighth where batches can be picked, else the first ones.

Data are often sorted, by class for example, and the first batches then say little about the others.
Batches can be picked from a list and anything else that can be indexed, from a dataset that can be
indexed with `batch_size`, and from a DataLoader of such a dataset; they are made anew for the main
evaluation, so that none stays in memory. All else is read once, from the start; what the pilot has
read is kept for the main evaluation.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from afterdrop.evaluation.batches import Source, open_batches
from afterdrop.evaluation.kept_items import copied

UNKNOWN = 8  # batches of a pilot if the number of all batches is not known


@dataclasses.dataclass(frozen=True)
class Division:
    """The data of the two stages of an adaptive evaluation.

    Attributes:
        pilot: The batches of the pilot, which can be read again.
        everything: All batches, those of the pilot among them.
        share: The share of all batches that the pilot has.
    """

    pilot: Collection[Any]
    everything: Iterable[Any]
    share: float


@dataclasses.dataclass(frozen=True)
class _Batches(Collection[Any]):
    """Batches whose number is known.

    Attributes:
        total: How many there are.
        read: Starts to read them.
    """

    total: int
    read: Callable[[], Iterator[Any]]

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[Any]:
        return self.read()

    def __contains__(self, item: object) -> bool:
        return any(item is batch for batch in self)


def divide(batches: Iterable[Any], share: float, source: Source) -> Division:
    """The batches of a pilot, and all of them.

    Args:
        batches: As the user gave them.
        share: The share that the pilot should have.
        source: How batches are made.

    Example:
        >>> list(divide([0, 1, 2, 3, 4], 0.5, Source()).pilot)
        [0, 2, 4]
        >>> list(divide(iter(range(100)), 0.5, Source()).pilot)
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    _, stream, total = open_batches(batches, source.batch_size, source.collate)
    if total is None:
        first = [copied(item) for item in itertools.islice(stream, UNKNOWN + 1)]
        if len(first) > UNKNOWN:
            return Division(first[:UNKNOWN], itertools.chain(first, stream), share)
        batches, source, stream, total = first, Source(), iter(first), len(first)  # that was all
    pilot = _picked(batches, range(0, total, math.floor(1 / share)), source)
    if pilot is None:
        first = [copied(item) for item in itertools.islice(stream, math.ceil(share * total))]
        pilot, stream = first, itertools.chain(first, stream)
    return Division(pilot, _Batches(total, lambda: stream), len(pilot) / total)


def _picked(batches: Any, numbers: range, source: Source) -> Collection[Any] | None:
    """The batches with some numbers; None if batches are only known one after another."""
    collate, size = source.collate, source.batch_size
    if type(batches) is DataLoader:
        return _from_loader(batches, numbers, collate)
    if isinstance(batches, Mapping) or not isinstance(batches, Sized):
        return None
    if not hasattr(batches, "__getitem__"):
        return None

    def batch(number: int) -> Any:
        if size is None:
            item = batches[number]
            return item if collate is None else collate(item)
        some = range(number * size, min((number + 1) * size, len(batches)))
        return open_batches([batches[i] for i in some], size, collate)[0]

    return _Batches(len(numbers), lambda: map(batch, numbers))


def _from_loader(
    loader: DataLoader[Any], numbers: range, collate: Callable[[Any], Any] | None
) -> Collection[Any] | None:
    """Some batches of a loader, made as it makes them; None if it reads a stream.

    One that shuffles has other batches in each pass, and its first ones are as good as any.
    """
    sampler = loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or sampler is None:
        return None
    if type(getattr(sampler, "sampler", None)) is not SequentialSampler:
        numbers = range(len(numbers))
    with torch.random.fork_rng(devices=[]):  # the caller's generator stays where it is
        some = [indices for n, indices in zip(range(numbers[-1] + 1), sampler) if n in numbers]
    again = DataLoader(
        loader.dataset,
        batch_sampler=some,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )
    return _Batches(len(some), lambda: iter(again) if collate is None else map(collate, again))
