"""The results of batches, joined along their targets as they come."""

import torch
from torch import Tensor

from afterdrop.evaluation.accumulators import Results
from afterdrop.evaluation.engines.generic import concatenate
from afterdrop.evaluation.pipeline import Pieces


class Collected:
    """Results of batch after batch.

    Where the number of targets is known beforehand, the first batch makes room for all and each one
    is copied to its place while a device works on the next: nothing is left to join at the end.

    Args:
        expected: Targets to make room for, or None; others are kept as they come and joined later.

    Example:
        >>> collected = Collected(expected=3)
        >>> collected.add({"targets": torch.tensor([4])})
        >>> collected.add({"targets": [torch.tensor([5]), torch.tensor([6])]})
        >>> collected.since(1)
        {'targets': tensor([5, 6])}
    """

    def __init__(self, expected: int | None = None) -> None:
        self.count = 0  # targets so far
        self._expected, self._placed = expected, 0
        self._room: Results = {}  # of which the first `_placed` targets are there
        self._others: list[tuple[int, Results]] = []  # with the number of the first target

    def add(self, pieces: Pieces) -> None:
        """Adds the results of the next targets, `targets` among them."""
        size = sum(map(len, _listed(pieces["targets"])))
        if self._expected is not None and self.count + size <= self._expected:
            self._place(pieces, self._expected)
            self._placed += size
        else:
            self._others.append((self.count, {n: _whole(value) for n, value in pieces.items()}))
        self.count += size

    def since(self, first: int) -> Results:
        """The results of all targets from number `first` on, at which a batch began."""
        parts = [part for start, part in self._others if start >= first]
        if self._room and first <= self._placed:
            placed = slice(first, self._placed)
            parts.insert(0, {name: room[..., placed] for name, room in self._room.items()})
        return concatenate(parts, -1) if parts else {}

    def _place(self, pieces: Pieces, expected: int) -> None:
        for name, value in pieces.items():
            start = self.count
            for piece in _listed(value):
                if name not in self._room:
                    self._room[name] = piece.new_empty((*piece.shape[:-1], expected))
                stop = start + piece.shape[-1]
                self._room[name][..., start:stop].copy_(piece)
                start = stop


def _listed(value: Tensor | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else value


def _whole(value: Tensor | list[Tensor]) -> Tensor:
    return value if isinstance(value, Tensor) else torch.cat(value, -1)
