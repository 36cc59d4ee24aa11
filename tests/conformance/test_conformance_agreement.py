"""The comparison of means and variances: its false alarms, and what it finds."""

import pytest
import torch

from afterdrop.conformance.agreement import FALSE_ALARM, compare, fewest_samples

K, N, V = 200, 4, 3


def skewed(generator, *shape):
    """Log-normal: the estimated error of a variance is far too small for these."""
    return torch.randn(shape, generator=generator).exp().square()


def rare(generator, *shape):
    return (torch.rand(shape, generator=generator) < 0.02).float()


@pytest.mark.parametrize("draw", [skewed, rare])
def test_equal_distributions_agree(draw):
    generator = torch.Generator().manual_seed(0)
    x, y = draw(generator, 2, 500, K, N, V)
    failed = sum(not compare(a, b, 1e-6).holds for a, b in zip(x, y))
    assert failed <= 500 * FALSE_ALARM + 2


def test_differences_are_found():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn((2, K, N, V), generator=generator)
    assert compare(x, y, 1e-6).holds
    assert compare(x, y + 0.7, 1e-6).mean > compare(x, y, 1e-6).bound
    assert compare(x, 1.4 * y, 1e-6).variance > compare(x, y, 1e-6).bound


def test_rounding_is_no_difference():
    x = torch.randn(K, N, V)
    assert compare(x, x, 1e-4).mean == 0
    constant = torch.full((K, N, V), -2.0)
    assert compare(constant, constant + 1e-6, 1e-4).holds
    assert not compare(constant, constant + 1e-2, 1e-4).holds


def test_with_the_fewest_samples_a_clear_difference_is_found():
    few = fewest_samples(2 * (N * V + 1))
    x = torch.randn(few, N, V)
    assert not compare(x, x + 5, 1e-4).holds
