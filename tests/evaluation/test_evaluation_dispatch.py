"""The dispatcher: the next engine, engines without kernels, smaller chunks, batches in flight."""

import pytest
import torch

from afterdrop.evaluation.chunks import Memory
from afterdrop.evaluation.engines.dispatch import Dispatcher, EngineMaker

NO_KERNEL = RuntimeError("Triton Error [CUDA]: device kernel image is invalid")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
CANNOT = "log-probabilities are too low"


class ScriptedEngine:
    """Gives its name and the number of the batch, or what a script says.

    Args:
        name: Its name.
        kernels: Whether it pretends to run kernels.
        script: What comes next for ("begin" or "finish", number): errors, or sentences why not.
    """

    ahead = 1

    def __init__(self, name, kernels, script):
        self.name, self.kernels, self.script = name, kernels, script
        self.cleared, self.held = 0, {}

    def begin(self, batch, number):
        self._follow("begin", number)
        return lambda: self._follow("finish", number) or f"{self.name}{number}".encode()

    def _follow(self, what, number):
        following = self.script.get((what, number), [])
        found = following.pop(0) if following else None
        if isinstance(found, Exception):
            raise found
        return found

    def clear(self):
        self.cleared += 1

    def carried(self):
        return self.held

    def restore(self, carried):
        self.held = dict(carried)


def dispatcher(scripts, memory=None):
    """A dispatcher of engines a, b, ..., of which the last has no kernels; and those it makes."""
    made = []

    def maker(name, kernels, script):
        def make():
            made.append(ScriptedEngine(name, kernels, script))
            return made[-1]

        return EngineMaker(make, kernels)

    last = len(scripts) - 1
    candidates = [maker(chr(97 + at), at < last, script) for at, script in enumerate(scripts)]
    return Dispatcher(candidates, memory or Memory(2**24, 2**24), "the test"), made


def run(engines, batches=3):
    """The results of batches of which each begins before the one before it is finished."""
    waiting = [engines.begin(None, number) for number in range(2)]
    found = []
    for number in range(batches):
        found.append(waiting.pop(0)())
        if number + 2 < batches:
            waiting.append(engines.begin(None, number + 2))
    return b" ".join(found).decode()


def test_a_batch_that_an_engine_cannot_compute_goes_to_the_next():
    engines, made = dispatcher([{("finish", 0): [CANNOT]}, {}, {}])
    assert run(engines) == "b0 a1 b2"  # a had begun 1
    assert [engine.name for engine in made] == ["a", "b"]


def test_the_next_engine_is_not_given_up_for_what_the_one_before_it_began():
    engines, made = dispatcher([{("finish", 0): [CANNOT], ("finish", 1): [CANNOT]}, {}, {}])
    assert run(engines) == "b0 b1 b2"
    assert [engine.name for engine in made] == ["a", "b"]


def test_several_engines_may_be_unable_to_compute_a_batch():
    engines, _ = dispatcher([{("finish", 1): [CANNOT]}, {("finish", 1): [CANNOT]}, {}])
    assert run(engines) == "a0 c1 a2"  # a had begun 2


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_kernels_that_fail_are_not_tried_in_another_engine(where):
    engines, made = dispatcher([{(where, 1): [NO_KERNEL]}, {}, {}])
    with pytest.warns(UserWarning, match="the test continues without kernels") as caught:
        found = run(engines)
    assert found == {"begin": "a0 c1 c2", "finish": "a0 c1 a2"}[where]
    assert [engine.name for engine in made] == ["a", "c"] and len(caught) == 1


def test_a_batch_in_flight_may_fail_after_its_engine_was_given_up():
    """The engine that is left has no kernels, and there is none after it."""
    engines, _ = dispatcher([{("finish", 0): [CANNOT], ("begin", 1): [NO_KERNEL]}, {}])
    with pytest.warns(UserWarning, match="continues without kernels"):
        assert run(engines) == "b0 b1 b2"
    engines, _ = dispatcher([{("finish", 0): [NO_KERNEL], ("begin", 1): [NO_KERNEL]}, {}])
    with pytest.warns(UserWarning, match="continues without kernels"):
        assert run(engines) == "b0 b1 b2"


@pytest.mark.parametrize("where", ["begin", "finish"])
def test_the_same_engine_goes_on_with_half_the_memory(where):
    memory = Memory(2**24, 2**24)
    engines, made = dispatcher([{(where, 1): [NO_MEMORY, NO_MEMORY]}, {}], memory)
    assert run(engines) == "a0 a1 a2"
    assert memory.budget == 2**22 and made[0].cleared == 2


@pytest.mark.parametrize(
    "memory", [Memory(2**20 - 1, 2**24), Memory(2**24, 2**24, divisible=False)]
)
def test_a_lack_of_memory_is_raised_if_chunks_cannot_be_smaller(memory):
    engines, _ = dispatcher([{("begin", 0): [NO_MEMORY]}, {}], memory)
    with pytest.raises(torch.OutOfMemoryError):
        run(engines)


@pytest.mark.parametrize("error", [ValueError("not a kernel's"), KeyError("x")])
def test_other_errors_are_raised(error):
    engines, made = dispatcher([{("finish", 0): [error]}, {}])
    with pytest.raises(type(error)):
        run(engines)
    assert len(made) == 1


def test_an_engine_without_kernels_cannot_fall_back():
    engines, _ = dispatcher([{("begin", 0): [NO_KERNEL]}])
    with pytest.raises(RuntimeError, match="kernel image is invalid"):
        run(engines)


def test_what_batches_carry_moves_to_the_next_engine():
    engines, made = dispatcher([{("finish", 1): [CANNOT]}, {}])
    made[0].restore({"state": torch.ones(2)})
    run(engines)
    assert torch.equal(engines.carried()["state"], torch.ones(2))
    assert made[0].cleared == 1
