"""Carried states by pieces and rounds, with a pass whose memory is known."""

import math

import pytest
import torch

from afterdrop.data import EvalStripes
from afterdrop.evaluation import carried_states as carry
from afterdrop.evaluation import text_windows as windows
from afterdrop.evaluation.text_windows import Windows
from afterdrop.models import LanguageModel, LanguageModelConfig


class Leaky:
    """What `carried_states` asks of a pass: two layers of one unit, of which h forgets."""

    def __init__(self, rows, kept):
        self.kept, self.runs = kept, 0
        self._h = torch.zeros(2, rows, 1, dtype=torch.float64)
        self._c = torch.zeros_like(self._h)

    @property
    def state(self):
        return tuple(zip(self._h.clone(), self._c.clone()))

    def reset(self):
        self.begin(tuple((torch.zeros_like(h), torch.zeros_like(h)) for h in self._h))

    def begin(self, state):
        self._h, self._c = (torch.stack(part) for part in zip(*state))

    def run(self, tokens):
        self.runs += 1
        for token in tokens.t().unsqueeze(-1):
            self._h = self._h * self.kept + token * torch.tensor([1.0, 0.5]).view(2, 1, 1)
            self._c = torch.tanh(self._h)


def chain(stripes, kept):
    """The same one window after another."""
    passes, found = Leaky(stripes.stripes, kept), []
    for tokens, _ in stripes:
        found.append(passes.state)
        passes.run(tokens)
    return found


def assert_states(found, wanted, near):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted):
        for pair, other in zip(ours, theirs):
            for a, b in zip(pair, other):
                torch.testing.assert_close(a, b, rtol=near, atol=near)


TEXT = torch.randint(9, (97,), generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("stripes", [1, 2, 3, 7])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99, 1.0])
def test_states_are_those_of_a_chain(stripes, kept):
    text = EvalStripes(TEXT.long(), 0, stripes, 4, lines=False)
    passes = Leaky(7, kept)
    found = list(carry.carried_states(passes, text))
    # A state that lacks 2^-11 goes on lacking it: what is left is a sum over pieces.
    assert_states(found, chain(text, kept), 0 if kept in (0.0, 1.0) else 2e-3)


def test_a_model_that_forgets_takes_two_rounds_and_one_that_does_not_all():
    text = EvalStripes(TEXT.long(), 0, 1, 4, lines=False)  # 25 windows, 4 of each of 7 pieces
    for kept, rounds in ((0.0, 2), (0.1, 2), (1.0, 7)):
        passes = Leaky(7, kept)
        list(carry.carried_states(passes, text))
        assert passes.runs == 4 * rounds, kept


def test_texts_whose_states_do_not_fit_come_in_sections():
    text = EvalStripes(TEXT.long(), 0, 2, 4, lines=False)  # 13 windows
    passes = Leaky(4, 1.0)
    states_of_five = 5 * 2 * 2 * 2 * 8
    found = list(carry.carried_states(passes, text, states_of_five))
    assert_states(found, chain(text, 1.0), 0)
    assert passes.runs == 2 * 3 + 2 * 3 + 2 * 2  # two pieces of three, three and two windows


def test_nan_states_end_the_rounds():
    text = EvalStripes(TEXT.long(), 0, 1, 4, lines=False)
    passes = Leaky(7, math.nan)
    *_, last = carry.carried_states(passes, text)
    assert passes.runs == 4 * 7 and last[0][0].isnan().all()


@pytest.mark.parametrize("works", [0, 1, 4])
def test_a_pass_that_cannot_run_gives_way_to_the_model(works, monkeypatch):
    """At once, and after the first section of windows; nothing is lost or comes twice."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(vocabulary=9, hidden_sizes=(3,))).eval()
    text = EvalStripes(TEXT.long(), 0, 2, 4, lines=False)  # 13 windows
    wanted = list(Windows(model, text, 3))
    states = [state for (_, state), _ in wanted]

    class Broken:
        """Gives the true states of some windows."""

        def __iter__(self):
            for number in range(works):
                h, c = states[number // 3][0]
                part = slice(2 * (number % 3), 2 * (number % 3) + 2)
                yield ((h[part], c[part]),)
            raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    monkeypatch.setattr(windows, "carried_states", lambda *_: iter(Broken()))
    with pytest.warns(UserWarning, match="the deterministic pass continues without kernels"):
        found = list(Windows(model, text, 3, object()))
    assert len(found) == len(wanted) == 5
    for ((tokens, state), targets), ((other, before), same) in zip(found, wanted):
        assert torch.equal(tokens, other) and torch.equal(targets, same)
        assert all(torch.equal(a, b) for a, b in zip(state[0], before[0]))
