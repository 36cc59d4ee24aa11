"""Results of batches: the same whether there was room for them from the start or not."""

import itertools

import pytest
import torch

from afterdrop.evaluation.result_buffer import Collected

N = 12
WHOLE = {"targets": torch.arange(N), "mc_half": torch.randn(2, 3, N), "det_one": torch.randn(N)}


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
    collected, begun = Collected(expected), []
    for start, stop, cuts in [(0, 4, ()), (4, 7, (1,)), (7, 7, ()), (7, 8, (1,)), (8, N, (2, 3))]:
        begun.append(start)
        given = batch(start, stop, cuts)
        collected.add(given)
        for value in given.values():
            for piece in value if isinstance(value, list) else []:
                piece.zero_()
        assert collected.count == stop
        for first in begun:
            found = collected.since(first)
            assert found.keys() == WHOLE.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, WHOLE[name][..., first:stop]), name


def test_all_that_was_expected_lies_where_it_was_put():
    """Nothing is copied at the end."""
    collected = Collected(N)
    collected.add(batch(0, 5, (2,)))
    before = collected.since(0)
    collected.add(batch(5, N))
    for name, tensor in collected.since(0).items():
        assert tensor.is_contiguous() and tensor.data_ptr() == before[name].data_ptr()


def test_nothing_was_added():
    assert Collected(N).since(0) == {} == Collected().since(0)
