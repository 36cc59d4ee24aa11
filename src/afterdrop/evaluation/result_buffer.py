"""The results of batches, joined along their targets as they come."""

from collections.abc import Mapping

from torch import Tensor

from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.schema import Results

# The results of a batch by name: a tensor, which may be kept, or pieces of one along the targets,
# in memory that is needed again and to be copied at once.
Pieces = Mapping[str, Tensor | list[Tensor]]
_COUNTED = schema.name_of("data", "targets")


class ResultBuffer:
    """Results of batch after batch.

    Where the number of targets is known beforehand, the first batch allocates room for all of them
    and each batch is copied to its place while a device works on the next: nothing is left to join
    at the end.

    Args:
        expected: Targets to allocate room for, or None to keep results as they come and join them
            at the end.

    Example:
        >>> import torch
        >>> buffer = ResultBuffer(expected=3)
        >>> buffer.add({"data.targets": torch.tensor([4])})
        >>> buffer.add({"data.targets": [torch.tensor([5]), torch.tensor([6])]})
        >>> buffer.since(1)
        {'data.targets': tensor([5, 6])}
    """

    def __init__(self, expected: int | None = None) -> None:
        self.count = 0  # targets so far
        self._expected, self._placed = expected, 0
        self._room: Results = {}  # of which the first `_placed` targets are filled
        self._others: list[tuple[int, Results]] = []  # with the number of the first target

    def add(self, pieces: Pieces) -> None:
        """Adds the results of the next targets."""
        size = sum(map(len, _listed(pieces[_COUNTED])))
        if self._expected is not None and self.count + size <= self._expected:
            self._place(pieces, self._expected)
            self._placed += size
        else:
            self._others.append((self.count, {n: _whole(n, v) for n, v in pieces.items()}))
        self.count += size

    def since(self, first: int) -> Results:
        """The results of all targets from number `first` on, at which a batch began."""
        parts = [part for start, part in self._others if start >= first]
        if self._room and first <= self._placed:
            placed = slice(first, self._placed)
            parts.insert(0, {name: room[..., placed] for name, room in self._room.items()})
        return schema.join(parts, "N") if parts else {}

    def _place(self, pieces: Pieces, expected: int) -> None:
        for name, value in pieces.items():
            start = self.count
            for piece in _listed(value):
                if name not in self._room:
                    self._room[name] = schema.empty_like(name, piece, expected)
                stop = start + piece.shape[-1]
                self._room[name][..., start:stop].copy_(piece)
                start = stop


def _listed(value: Tensor | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else value


def _whole(name: str, value: Tensor | list[Tensor]) -> Tensor:
    return (
        value if isinstance(value, Tensor) else schema.join([{name: v} for v in value], "N")[name]
    )
