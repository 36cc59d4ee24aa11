"""Binned sums over many classes against float64."""

import pytest
import torch

from afterdrop.family.binned_sums import BinnedSums
from afterdrop.family.exponential import exp_times
from afterdrop.family.temperature import Nodes

INVERSE = Nodes(0.125, 8.0).inverse()


def exact(below):
    return torch.stack([(below.double() * b).exp().sum(-1) for b in INVERSE], -1)


def spread(kind, classes=5000):
    generator = torch.Generator().manual_seed(0)
    if kind == "normal":
        logits = torch.randn(4, classes, generator=generator) * 3
    elif kind == "equal":  # all classes but one at the edge of a bin
        logits = torch.zeros(4, classes)
        logits[:, 0] = torch.tensor([1.0, 2.0, 8.0 - 1e-6, 8.0])
    elif kind == "narrow":
        logits = torch.rand(4, classes, generator=generator) * 1e-4
    else:
        logits = torch.randn(4, classes, generator=generator) * 300
    return logits - logits.amax(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["normal", "equal", "narrow", "wide"])
def test_sums_match_float64(kind):
    below = spread(kind)
    found = BinnedSums(INVERSE, below).sums(below)
    torch.testing.assert_close(found.double().log(), exact(below).log(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["normal", "equal", "narrow", "wide"])
def test_the_error_of_the_bins_alone_is_below_1e_6(kind):
    below = spread(kind).double()
    found = BinnedSums(INVERSE, below).sums(below)
    torch.testing.assert_close(found.log(), exact(below).log(), rtol=0, atol=1e-6)


def test_classes_of_probability_zero_add_nothing():
    below = spread("normal")
    hidden = torch.cat([below, torch.full((4, 100), -torch.inf)], -1)
    bins = BinnedSums(INVERSE, below)
    torch.testing.assert_close(bins.sums(hidden), bins.sums(below), rtol=1e-6, atol=1e-6)
    assert hidden.isneginf().sum() == 400


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_are_as_accurate_as_their_argument(dtype):
    x = torch.linspace(-80, 80, 1001, dtype=dtype)
    near = 160 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        exp_times(x, 0.75), (0.75 * x.double()).exp().to(dtype), rtol=near, atol=0
    )
    assert exp_times(torch.tensor([-torch.inf]), 2.0).item() == 0


def test_exponentials_in_place():
    x = torch.tensor([0.0, 1.0])
    assert exp_times(x, 2.0, out=x) is x
    torch.testing.assert_close(x, torch.tensor([0.0, 2.0]).exp())
