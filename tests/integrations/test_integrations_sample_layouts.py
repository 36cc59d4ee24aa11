"""Samples in the layouts of baal and small-text: the documented permutations."""

import pytest
import torch

import afterdrop as ad
from oracles.zoo import mlp


def test_mutual_information_from_either_layout_is_that_of_the_predictor():
    predict = ad.Predictor(mlp(classes=7).eval(), ad.AMC, num_samples=16)
    x = torch.randn(9, 5)
    samples = predict.samples(x)
    expected = predict.uncertainty(x).mutual_information

    def entropy(p, dim):
        return -(p * p.log()).sum(dim)

    for_baal = samples.exp().permute(1, 2, 0).double()
    assert for_baal.shape == (9, 7, 16)
    bald = entropy(for_baal.mean(2), 1) - entropy(for_baal, 1).mean(1)
    torch.testing.assert_close(bald.float(), expected, atol=1e-5, rtol=1e-4)

    for_small_text = samples.exp().permute(1, 0, 2).double()
    assert for_small_text.shape == (9, 16, 7)
    bald = entropy(for_small_text.mean(1), 1) - entropy(for_small_text, 2).mean(1)
    torch.testing.assert_close(bald.float(), expected, atol=1e-5, rtol=1e-4)


def test_pixels_stay_between_classes_and_samples_for_baal():
    net = torch.nn.Sequential(torch.nn.Dropout2d(0.5), torch.nn.Conv2d(2, 3, 1)).eval()
    predict = ad.Predictor(net, ad.AMC, num_samples=4, class_dim=1)
    found = predict.samples(torch.randn(5, 2, 6, 7)).exp().movedim(0, -1)
    assert found.shape == (5, 3, 6, 7, 4)
    assert found.sum(1) == pytest.approx(torch.ones(5, 6, 7, 4), abs=1e-5)
