"""Uniforms that are drawn for several sites at once are those that each site draws by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from afterdrop.masks import draws_ahead
from afterdrop.masks.draws_ahead import DrawsAhead
from afterdrop.masks.operators import Place
from afterdrop.masks.rows import Rows, draw_row_mask
from afterdrop.masks.sites import find_sites
from afterdrop.masks.uniforms import Plan, site_key, small_uniforms, uniforms

PLACES = [Place(f"layer{number}", 0) for number in range(6)]
EXAMPLES = (torch.arange(3), torch.tensor([5, 1]), None)

# What a model may ask for next: any place, any call of it, in any order and shape.
REQUEST = st.tuples(
    st.sampled_from([*PLACES, Place("unseen", 0)]),
    st.integers(0, 1),  # the call
    st.sampled_from([Plan(4), Plan(4, seed=1), Plan(4, scheme="iid")]),
    st.sampled_from([range(4), range(2, 4)]),
    st.sampled_from(EXAMPLES),
    st.sampled_from([(5,), (2, 3), (), (3000,)]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(REQUEST, st.integers(1, 7)), max_size=6))
def test_draws_are_those_of_each_site_whatever_a_model_asks_for(requests):
    ahead = DrawsAhead(PLACES)
    for (place, call, plan, samples, examples, coords), sites in requests:
        start = PLACES.index(place) if place in PLACES else 0
        for each in [place, *PLACES[start + 1 : start + sites]]:
            key = site_key(plan.seed, *each, call)
            drawn = ahead.uniforms(plan, key, samples, examples, coords)
            torch.testing.assert_close(
                drawn, uniforms(plan, key, samples, examples, coords), rtol=0, atol=0
            )


@pytest.fixture
def draws(monkeypatch):
    """How many sites each draw of small sites is for."""
    counts = []

    def counted(plan, keys, *args):
        counts.append(len(keys))
        return small_uniforms(plan, keys, *args)

    monkeypatch.setattr(draws_ahead, "small_uniforms", counted)
    return counts


def deep(sites):
    torch.manual_seed(0)
    layers = [layer for _ in range(sites) for layer in (nn.Dropout(0.2), nn.Linear(4, 4))]
    return nn.Sequential(*layers)


def test_a_deep_model_draws_for_twice_as_many_sites_each_time(draws):
    model, x = deep(40), torch.randn(3, 4)
    control = find_sites(model, x).control(model)
    rows = Rows(Plan(4), (1.0,), range(4), torch.arange(3))
    with control.prepared((1.0,)):
        control.forward(rows, x.repeat(4, 1))
    assert draws == [1, 2, 4, 8, 16, 9]


class EveryThird(nn.Module):
    """Runs all its dropout once, in the dry run, and a third of it from then on."""

    def __init__(self):
        super().__init__()
        self.layers, self.all = deep(40), True

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if self.all or isinstance(layer, nn.Linear) or number % 6 == 0:
                x = layer(x)
        return x


def test_a_model_that_skips_sites_gets_the_masks_of_those_that_it_runs(draws):
    model, x = EveryThird(), torch.randn(3, 4)
    control = find_sites(model, x).control(model)
    model.all, rows = False, Rows(Plan(4), (1.0,), range(4), torch.arange(3))

    def output():
        with control.prepared((1.0,)):
            return control.forward(rows, x.repeat(4, 1))

    guessed = output()
    assert len(draws) > 1  # some guesses were wrong
    control.draw = draw_row_mask
    assert torch.equal(guessed, output())
    assert not torch.equal(guessed, x.repeat(4, 1))


def test_draws_ahead_stay_on_their_device():
    ahead, request = DrawsAhead(PLACES), (range(4), EXAMPLES[0], (5,))
    keys = [site_key(0, *place, 0) for place in PLACES]
    for key in keys[:3]:  # the fourth site is drawn with the third
        ahead.uniforms(Plan(4), key, *request)
    assert ahead.uniforms(Plan(4), keys[3], *request, device="meta").device.type == "meta"
