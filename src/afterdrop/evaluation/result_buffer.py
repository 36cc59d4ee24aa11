"""The results of batches, joined along their targets as they come."""

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.schema import Results

# The results of a batch by name: a tensor, which may be kept, or pieces of one along the targets,
# in memory that is needed again and to be copied at once.
Pieces = Mapping[str, Tensor | list[Tensor]]
_COUNTED = schema.name_of("data", "targets")
# Bytes of a block. The C library gives allocations above 32 MiB back to the system when they are
# freed; thousands of small tensors, one set per batch, would stay as holes in the heap.
_BLOCK = 33 << 20
_ALIGNMENT = 64


@dataclasses.dataclass
class _Block:
    """Room for some targets, of which the first `filled` are there."""

    first: int
    capacity: int
    room: Results
    filled: int = 0

    def fill(self, pieces: Mapping[str, list[Tensor]], last: int) -> int:
        """Copies from the `last` targets of the pieces; returns for how many there was room."""
        stop = min(self.filled + last, self.capacity)
        # Pieces are laid out so that they end with the `last` targets; those before are elsewhere.
        for name, parts in pieces.items():
            place = self.filled + last - sum(part.shape[-1] for part in parts)
            for part in parts:
                start, end = max(place, self.filled), min(place + part.shape[-1], stop)
                if start < end:
                    self.room[name][..., start:end].copy_(part[..., start - place : end - place])
                place += part.shape[-1]
        size, self.filled = stop - self.filled, stop
        return size

    def part(self, first: int, stop: int) -> Results:
        """The results of the targets from number `first` up to `stop`."""
        place = slice(max(0, first - self.first), max(0, min(self.filled, stop - self.first)))
        return {name: room[..., place] for name, room in self.room.items()}


class ResultBuffer:
    """Results of batch after batch, copied into large blocks, which are filled to their end.

    Where the number of targets is known beforehand, the first block has room for all of them, and
    each batch is copied to its final place while a device works on the next: nothing is left to
    join at the end.

    Args:
        expected: Targets to allocate room for, or None if their number is not known.

    Example:
        >>> import torch
        >>> buffer = ResultBuffer(expected=3)
        >>> buffer.add({"data.targets": torch.tensor([4])})
        >>> buffer.add({"data.targets": [torch.tensor([5]), torch.tensor([6])]})
        >>> buffer.part(1, 3)
        {'data.targets': [tensor([5, 6])]}
    """

    def __init__(self, expected: int | None = None) -> None:
        self.count = 0  # targets so far
        self._expected = expected
        self._blocks: list[_Block] = []

    def add(self, pieces: Pieces) -> None:
        """Adds the results of the next targets."""
        listed = {name: _listed(value) for name, value in pieces.items()}
        heads = {name: parts[0] for name, parts in listed.items()}
        end = self.count + sum(map(len, listed[_COUNTED]))
        if not self._blocks:
            self._blocks.append(self._first_block(heads, end))
        while True:
            self.count += self._blocks[-1].fill(listed, end - self.count)
            if self.count == end:
                return
            self._blocks.append(self._new_block(heads))

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def part(self, first: int, stop: int) -> dict[str, list[Tensor]]:
        """The results of the targets from number `first` up to `stop`, a piece per block."""
        some = [b for b in self._blocks if b.first < stop and b.first + b.filled > first]
        parts = [block.part(first, stop) for block in some or self._blocks[-1:]]
        return {name: [part[name] for part in parts] for name in parts[0]} if parts else {}

    def take(self) -> Results:
        """All results, which the buffer then no longer holds.

        Blocks are freed one by one as they are copied, so that not everything is there twice.
        """
        blocks, self._blocks = self._blocks, []
        if not blocks or (len(blocks) == 1 and self._expected is not None):
            return blocks[0].part(0, self.count) if blocks else {}
        whole: Results = {
            name: room.new_empty(schema.room_shape(name, room, self.count))
            for name, room in blocks[0].room.items()
        }
        while blocks:
            block = blocks.pop(0)
            for name, part in block.part(0, self.count).items():
                whole[name][..., block.first : block.first + block.filled].copy_(part)
        return whole

    def _first_block(self, heads: Results, size: int) -> _Block:
        """A block for all targets if their number is known, and not less than the first `size`."""
        if self._expected is None or size > self._expected:
            return self._new_block(heads)
        full = self._expected
        room = {n: h.new_empty(schema.room_shape(n, h, full)) for n, h in heads.items()}
        return _Block(0, full, room)

    def _new_block(self, heads: Results) -> _Block:
        """A block for the targets from the next one on."""
        each = sum(math.prod(schema.room_shape(n, h, 1)) * h.itemsize for n, h in heads.items())
        capacity = max(1, _BLOCK // each)
        size = each * capacity + _ALIGNMENT * len(heads)
        memory = heads[_COUNTED].new_empty(size, dtype=torch.uint8)
        room, place = {}, 0
        for name, head in heads.items():
            shape = schema.room_shape(name, head, capacity)
            stop = place + math.prod(shape) * head.itemsize
            room[name] = memory[place:stop].view(head.dtype).view(shape)
            place = stop + -stop % _ALIGNMENT
        return _Block(self.count, capacity, room)


def _listed(value: Tensor | list[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else value
