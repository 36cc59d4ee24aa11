"""Results of batches: the same whether there was room for them from the start or not."""

import itertools

import pytest
import torch

from afterdrop.evaluation import result_buffer
from afterdrop.evaluation.result_buffer import ResultBuffer

N = 12
WHOLE = {
    "data.targets": torch.arange(N),
    "sampled.half": torch.randn(2, 3, 2, 12, N),
    "deterministic.one": torch.randn(N),
}


def batch(start, stop, cuts=()):
    """Results of some targets; with cuts, in pieces of memory that is used again."""
    part = {name: tensor[..., start:stop].clone() for name, tensor in WHOLE.items()}
    if not cuts:
        return part
    edges = [0, *cuts, stop - start]
    return {
        name: [tensor[..., a:b].clone() for a, b in itertools.pairwise(edges)]
        for name, tensor in part.items()
    }


@pytest.mark.parametrize("expected", [None, 0, 4, 7, N, N + 3])
def test_any_batches_and_pieces_join_to_the_whole(expected):
    buffer, begun = ResultBuffer(expected), []
    for start, stop, cuts in [(0, 4, ()), (4, 7, (1,)), (7, 7, ()), (7, 8, (1,)), (8, N, (2, 3))]:
        begun.append(start)
        given = batch(start, stop, cuts)
        buffer.add(given)
        for value in given.values():
            for piece in value if isinstance(value, list) else []:
                piece.zero_()
        assert buffer.count == stop
        for first in begun:
            for last in [n for n in begun if n >= first] + [stop]:
                found = buffer.part(first, last)
                assert found.keys() == WHOLE.keys()
                for name, pieces in found.items():
                    assert torch.equal(torch.cat(pieces, -1), WHOLE[name][..., first:last]), name


def test_all_that_was_expected_lies_where_it_was_put():
    """Nothing is copied at the end."""
    buffer = ResultBuffer(N)
    buffer.add(batch(0, 5, (2,)))
    before = buffer.part(0, 5)
    buffer.add(batch(5, N))
    for name, [tensor] in buffer.part(0, N).items():
        assert tensor.is_contiguous() and tensor.data_ptr() == before[name][0].data_ptr()


def test_nothing_was_added():
    assert ResultBuffer(N).part(0, 0) == {} == ResultBuffer().part(0, 0)


def test_blocks_are_filled_whatever_the_size_of_batches(monkeypatch):
    monkeypatch.setattr(result_buffer, "_BLOCK", 80)  # ten targets
    buffer = ResultBuffer()
    for first in range(0, 42, 6):
        buffer.add({"data.targets": [torch.arange(first, first + 4), torch.tensor([first + 4])]})
        buffer.add({"data.targets": torch.tensor([first + 5])})
    assert [block.filled for block in buffer._blocks] == [10, 10, 10, 10, 2]
    pieces = buffer.part(17, 42)["data.targets"]
    assert [piece.tolist() for piece in pieces] == [
        *([17, 18, 19], list(range(20, 30)), list(range(30, 40)), [40, 41])
    ]
    assert buffer.take()["data.targets"].tolist() == list(range(42))
