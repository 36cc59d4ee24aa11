"""Batches under way: order, errors and interruptions lose nothing, and resuming ends the same."""

import itertools

import pytest
import torch

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.evaluation.engines.dispatch import Dispatcher, EngineMaker, evaluation_engines
from afterdrop.evaluation.loop import Execution, behind, run_evaluation
from afterdrop.evaluation.request import Request
from afterdrop.masks.uniforms import Plan
from afterdrop.tensor_files import read_tensors
from oracles.zoo import mlp

N = 6  # batches
REQUEST = Request(ad.Grid((0, 0.5, 1), (0, 0.5, 1)), Plan(4), temperatures=(0.25, 4.0))


class Ahead:
    """Works on a batch when it is begun, gives its results when the next one is begun."""

    kernels = False

    def __init__(self, engine, ahead, fails_to_begin, fails_to_finish, events):
        self.engine, self.ahead, self.events = engine, ahead, events
        self.fails_to_begin, self.fails_to_finish = fails_to_begin, fails_to_finish

    def begin(self, batch, number):
        self.events.append(f"begin {number}")
        if number == self.fails_to_begin:
            raise RuntimeError("cannot begin")
        found = self.engine.begin(batch, number)()

        def results():
            self.events.append(f"finish {number}")
            if number == self.fails_to_finish:
                raise RuntimeError("cannot finish")
            return found

        return results

    def __getattr__(self, name):
        return getattr(self.engine, name)


def evaluated(
    model,
    data,
    resume=None,
    targets=None,
    ahead=1,
    fails_to_begin=None,
    fails_to_finish=None,
    events=None,
):
    def choose(model, protocol, likelihood, sites, memory):
        plain, _ = evaluation_engines(model, protocol, likelihood, sites, memory)
        noted = [] if events is None else events
        made = Ahead(plain.engine, ahead, fails_to_begin, fails_to_finish, noted)
        return Dispatcher([EngineMaker(lambda: made, kernels=False)], memory, "the test"), None

    return run_evaluation(model, data, REQUEST, Execution(resume=resume), targets, choose)


def plain(model, data):
    return run_evaluation(model, data, REQUEST, Execution())


@pytest.fixture
def world():
    torch.manual_seed(0)
    data = [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(N)]
    return mlp(), data


def assert_same(found, wanted):
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert torch.equal(found.tensors[name], tensor), name


def finished(folder):
    """Numbers of the batches in a folder of parts."""
    notes = [read_tensors(path)[1] for path in sorted(folder.glob("part-*"))]
    return [number for note in notes for number in note["numbers"]]


def test_each_batch_is_begun_before_the_one_before_it_is_finished(world):
    events = []
    assert_same(evaluated(*world, events=events), plain(*world))
    middle = itertools.chain(*([f"begin {n}", f"finish {n - 1}"] for n in range(1, N)))
    assert events == ["begin 0", *middle, f"finish {N - 1}"]


def test_other_engines_finish_a_batch_before_the_next_is_asked_for(world):
    """A plain evaluation holds one batch at a time, and a sampled carry needs the one before."""
    model, data = world
    events = []

    def noted():
        for number, item in enumerate(data[:3]):
            events.append(f"data {number}")
            yield item

    evaluated(model, noted(), ahead=0, events=events)
    assert events == [f"{what} {n}" for n in range(3) for what in ("data", "begin", "finish")]


@pytest.mark.parametrize("at", [1, 3, N - 1])
def test_a_batch_that_cannot_begin_does_not_lose_the_one_before(world, tmp_path, at):
    with pytest.raises(RuntimeError, match="cannot begin"):
        evaluated(*world, tmp_path / "p", fails_to_begin=at)
    assert finished(tmp_path / "p") == list(range(at))
    resumed = evaluated(*world, tmp_path / "p")
    assert_same(resumed, plain(*world))


@pytest.mark.parametrize("targets", [None, 4 * N])
@pytest.mark.parametrize("at", [1, 3, N - 1])
def test_a_batch_that_cannot_finish_is_done_again(world, tmp_path, at, targets):
    """The one begun after it is not there yet, and is done again too."""
    with pytest.raises(RuntimeError, match="cannot finish"):
        evaluated(*world, tmp_path / "p", targets, fails_to_finish=at)
    assert finished(tmp_path / "p") == list(range(at))
    resumed = evaluated(*world, tmp_path / "p", targets)
    assert_same(resumed, plain(*world))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk")], ids=repr)
@pytest.mark.parametrize("at", [1, 4])
def test_data_that_end_early_lose_nothing(world, tmp_path, at, error):
    model, data = world

    def ending():
        yield from data[:at]
        raise error

    with pytest.raises(type(error)):
        evaluated(model, ending(), tmp_path / "p")
    assert finished(tmp_path / "p") == list(range(at))
    events = []
    resumed = evaluated(model, data, tmp_path / "p", events=events)
    assert events[:2] == [f"begin {at}", f"begin {at + 1}"]
    assert_same(resumed, plain(model, data))


def test_a_bad_batch_is_refused_after_those_before_it(world, tmp_path):
    model, data = world
    bad = [*data[:2], (data[2][0], torch.full((4,), 7)), *data[3:]]
    with pytest.raises(DataError, match="batch 2"):
        evaluated(model, bad, tmp_path / "p")
    assert finished(tmp_path / "p") == [0, 1]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_all_come_in_order_however_far_ahead(ahead):
    made = []
    given = []
    for item in behind((made.append(n) or n for n in range(5)), ahead):
        assert len(made) == min(5, item + 1 + ahead)
        given.append(item)
    assert given == list(range(5))
