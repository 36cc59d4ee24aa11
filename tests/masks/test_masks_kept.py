"""Masks that a predictor keeps: those of `draw_row_mask`, within their budget."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import afterdrop as ad
from afterdrop.masks.kept_masks import KeptMasks
from afterdrop.masks.rows import Layout, Rows, draw_row_mask
from afterdrop.masks.uniforms import SCHEMES, Plan
from oracles.zoo import ConvNet, Recurrent

LAYOUTS = [Layout(0), Layout(1), Layout(0, "outer"), Layout(None), Layout(None, varies=True)]


def shape_of(layout, rows, sizes):
    if layout.dim is None:
        return list(sizes)
    shape = [*sizes]
    shape[layout.dim] *= rows
    return shape


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(SCHEMES),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    st.sampled_from([0, 200, 10**6]),
)
@pytest.mark.parametrize("packed_from", [1, 4096])
def test_kept_masks_are_those_drawn_for_each_row(
    packed_from, layout, scheme, examples, lengths, budget
):
    with mock.patch("afterdrop.masks.kept_masks._PACKED", packed_from):
        _compare_kept_masks(layout, scheme, examples, lengths, budget)


def _compare_kept_masks(layout, scheme, examples, lengths, budget):
    plan, kept = Plan(8, 1, scheme), KeptMasks(budget)
    for sizes in lengths:
        for samples in (range(2), range(2, 8)) if layout.dim is not None else (range(5, 6),):
            rows = Rows(plan, (0.5,), samples, torch.zeros(examples, dtype=torch.int64))
            x = torch.randn(shape_of(layout, len(rows), sizes))
            wanted, got = (draw(rows, 7, layout, x, (0.3,)) for draw in (draw_row_mask, kept.draw))
            mask = got.mask.expand(wanted.mask.shape)
            assert torch.equal(mask, wanted.mask)
            assert torch.equal(got.drop(x), wanted.drop(x))
            assert torch.equal(got.drop(x), got.drop(x))
    assert kept.bytes <= budget


@pytest.mark.parametrize("alpha", [False, True])
def test_predictions_do_not_depend_on_what_is_kept(alpha):
    torch.manual_seed(0)
    drop = nn.AlphaDropout if alpha else nn.Dropout
    model = nn.Sequential(drop(0.2), nn.Linear(6, 300), drop(0.4), nn.Linear(300, 4)).eval()
    x, few = torch.randn(9, 6), 2**20
    predictors = [ad.Predictor(model, ad.AMC, 20, memory=memory) for memory in (None, few)]
    for part in (x, x[:2], x):
        torch.testing.assert_close(*(predict(part) for predict in predictors))


@pytest.mark.parametrize("make", [Recurrent, ConvNet])
def test_a_second_call_gives_the_bits_of_the_first(make):
    torch.manual_seed(0)
    model = make().eval()
    predict = ad.Predictor(model, ad.AMC, 8, class_dim=-1)
    inputs = [torch.randint(11, (5, n)) for n in (4, 7, 3)]
    if make is ConvNet:
        inputs = [torch.randn(n, 1, 8, 8) for n in (4, 7, 3)]
    first = [predict(x) for x in inputs]
    for x, found in zip(inputs, first):
        assert torch.equal(predict(x), found)
        fresh = ad.Predictor(model, ad.AMC, 8, class_dim=-1)
        assert torch.equal(fresh(x), found)


def test_masks_are_drawn_once(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 30), nn.Dropout(0.4), nn.Linear(30, 4))
    predict, x = ad.Predictor(model.eval(), ad.AMC, 20), torch.randn(9, 6)
    found = predict(x)
    monkeypatch.setattr("afterdrop.masks.kept_masks.uniforms", None)
    assert torch.equal(predict(x), found)
    torch.testing.assert_close(predict(x[:3]), found[:3])
    fresh = ad.Predictor(model, ad.AMC, 20, per_example=True)
    assert not torch.allclose(fresh(x), found)


def test_large_masks_are_kept_as_bits():
    plan, kept = Plan(20, 1), KeptMasks(10**6)
    rows = Rows(plan, (1.0,), range(3), torch.zeros(2, dtype=torch.int64))
    kept.draw(rows, 7, Layout(0), torch.randn(6, 50, 99), (0.4,))
    assert kept.bytes == 20 * 50 * 13  # 99 units in 13 bytes
    kept.draw(rows, 8, Layout(0), torch.randn(6, 5), (0.4,))
    assert kept.bytes == 20 * 50 * 13 + 20 * 5 * 4
