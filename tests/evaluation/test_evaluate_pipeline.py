"""Batches under way: order, errors and interruptions lose nothing, and resuming ends the same."""

import itertools

import pytest
import torch

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.evaluation.api import Settings, run_evaluation
from afterdrop.evaluation.engines.generic import Worker
from afterdrop.evaluation.pipeline import behind
from afterdrop.evaluation.scores.scores_file import read_tensors
from afterdrop.masks.uniforms import Plan
from oracles.zoo import mlp

N = 6  # batches


class Ahead(Worker):
    """Works on a batch when it is begun, gives its results when the next one is begun."""

    ahead = 1
    fails_to_begin = fails_to_finish = None
    events: list

    def begin(self, batch, number):
        self.events.append(f"begin {number}")
        if number == self.fails_to_begin:
            raise RuntimeError("cannot begin")
        found = self.batch(batch, number)

        def results():
            self.events.append(f"finish {number}")
            if number == self.fails_to_finish:
                raise RuntimeError("cannot finish")
            return found

        return results


def kind(**attributes):
    return type("Kind", (Ahead,), {"events": [], **attributes})


@pytest.fixture
def world():
    torch.manual_seed(0)
    data = [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(N)]
    return mlp(), data


def settings(resume=None):
    grid = ad.Grid((0, 0.5, 1), (0, 0.5, 1))
    return Settings(grid, Plan(4), temperatures=(0.25, 4.0), resume=resume)


def assert_same(found, wanted):
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def finished(folder):
    """Numbers of the batches in a folder of parts."""
    notes = [read_tensors(path)[1] for path in sorted(folder.glob("part-*"))]
    return [number for note in notes for number in note["numbers"]]


def test_each_batch_is_begun_before_the_one_before_it_is_finished(world):
    worker = kind()
    found = run_evaluation(*world, settings(), worker)
    assert_same(found, run_evaluation(*world, settings()))
    middle = itertools.chain(*([f"begin {n}", f"finish {n - 1}"] for n in range(1, N)))
    assert worker.events == ["begin 0", *middle, f"finish {N - 1}"]


def test_other_workers_finish_a_batch_before_the_next_is_asked_for(world):
    """A plain evaluation holds one batch at a time, and a sampled carry needs the one before."""
    model, data = world
    events = []

    class Plain(Worker):
        def batch(self, batch, number):
            events.append(f"batch {number}")
            return super().batch(batch, number)

    def noted():
        for number, item in enumerate(data[:3]):
            events.append(f"data {number}")
            yield item

    run_evaluation(model, noted(), settings(), Plain)
    assert events == ["data 0", "batch 0", "data 1", "batch 1", "data 2", "batch 2"]


@pytest.mark.parametrize("at", [1, 3, N - 1])
def test_a_batch_that_cannot_begin_does_not_lose_the_one_before(world, tmp_path, at):
    with pytest.raises(RuntimeError, match="cannot begin"):
        run_evaluation(*world, settings(tmp_path / "p"), kind(fails_to_begin=at))
    assert finished(tmp_path / "p") == list(range(at))
    resumed = run_evaluation(*world, settings(tmp_path / "p"), kind())
    assert_same(resumed, run_evaluation(*world, settings()))


@pytest.mark.parametrize("targets", [None, 4 * N])
@pytest.mark.parametrize("at", [1, 3, N - 1])
def test_a_batch_that_cannot_finish_is_done_again(world, tmp_path, at, targets):
    """The one begun after it is not there yet, and is done again too."""
    with pytest.raises(RuntimeError, match="cannot finish"):
        run_evaluation(*world, settings(tmp_path / "p"), kind(fails_to_finish=at), targets)
    assert finished(tmp_path / "p") == list(range(at))
    resumed = run_evaluation(*world, settings(tmp_path / "p"), kind(), targets)
    assert_same(resumed, run_evaluation(*world, settings()))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk")], ids=repr)
@pytest.mark.parametrize("at", [1, 4])
def test_data_that_end_early_lose_nothing(world, tmp_path, at, error):
    model, data = world

    def ending():
        yield from data[:at]
        raise error

    with pytest.raises(type(error)):
        run_evaluation(model, ending(), settings(tmp_path / "p"), kind())
    assert finished(tmp_path / "p") == list(range(at))
    worker = kind()
    resumed = run_evaluation(model, data, settings(tmp_path / "p"), worker)
    assert worker.events[:2] == [f"begin {at}", f"begin {at + 1}"]
    assert_same(resumed, run_evaluation(model, data, settings()))


def test_a_bad_batch_is_refused_after_those_before_it(world, tmp_path):
    model, data = world
    bad = [*data[:2], (data[2][0], torch.full((4,), 7)), *data[3:]]
    with pytest.raises(DataError, match="batch 2"):
        run_evaluation(model, bad, settings(tmp_path / "p"), kind())
    assert finished(tmp_path / "p") == [0, 1]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_all_come_in_order_however_far_ahead(ahead):
    made = []
    given = []
    for item in behind((made.append(n) or n for n in range(5)), ahead):
        assert len(made) == min(5, item + 1 + ahead)
        given.append(item)
    assert given == list(range(5))
