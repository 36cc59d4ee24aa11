"""Partitions at temperature nodes, interpolated from a partition ladder, against `partitions`."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afterdrop.family.partition_ladder import HALVES_EVERY, OCTAVES, PER_OCTAVE, PartitionLadder
from afterdrop.family.temperature import COARSE, Nodes, partitions

NODES = Nodes(0.125, 8.0)
LADDER = PartitionLadder(NODES)


def exact(log_means, inverse):
    below = log_means - log_means.amax(-1, keepdim=True)
    return (inverse.view(-1, 1, 1) * below).logsumexp(-1)


def test_each_octave_doubles_the_powers_of_the_last():
    assert LADDER.inverse.shape == (OCTAVES * PER_OCTAVE,)
    torch.testing.assert_close(LADDER.inverse[PER_OCTAVE:], 2 * LADDER.inverse[:-PER_OCTAVE])
    assert LADDER.inverse[PER_OCTAVE // 2] == pytest.approx(float(NODES.inverse()[0]))
    assert LADDER.inverse[-1] > NODES.inverse()[-1]


@pytest.mark.parametrize("degree", range(8))
def test_weights_are_exact_for_polynomials_in_log_b(degree):
    """Up to a degree below the number of points, up to rounding."""
    x, fine = LADDER.inverse.log() / 3, NODES.inverse().log() / 3
    near = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(LADDER.fine @ x**degree, fine**degree, **near)
    found = LADDER.coarse @ x[::HALVES_EVERY] ** degree
    torch.testing.assert_close(found, fine[::COARSE] ** degree, **near)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 3000), st.floats(0.01, 12), st.integers(0, 2**31))
def test_partitions_of_random_logits_are_within_1e_5(classes, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(3, classes, generator=generator, dtype=torch.float64)
    found = LADDER.fine @ exact(logits, LADDER.inverse)
    wanted, _ = partitions(logits, NODES.inverse())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gap", [2.0, 5.0, 12.0])
def test_one_class_far_above_thousands_of_equal_ones_is_the_worst_case(gap):
    """Z then has complex zeros close to the real line, and G is least like a polynomial."""
    logits = torch.full((1, 10000), -gap, dtype=torch.float64)
    logits[0, 0] = 0
    off = LADDER.fine @ exact(logits, LADDER.inverse) - exact(logits, NODES.inverse())
    between = torch.linspace(-2, 2.7, 200, dtype=torch.float64).exp()
    own = NODES.weights(between) @ exact(logits, NODES.inverse())[..., 0]
    own_error = (own - exact(logits, between)[..., 0]).abs().max()
    assert off.abs().max() < 3e-5 and off.abs().max() < own_error / 20


@pytest.mark.parametrize(("samples", "noise"), [(4, 1.0), (4, 2.5), (100, 2.0)])
def test_halves_from_every_fourth_power_are_as_accurate_as_the_coarse_nodes(samples, noise):
    """At every temperature of the bracket, interpolating between the nodes dominates the error."""
    generator = torch.Generator().manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    log_probs = (3 * normal(4, 1000) + noise * normal(samples, 4, 1000)).log_softmax(-1)
    whole, half = log_probs.logsumexp(0), log_probs[::2].logsumexp(0)

    def gap(inverse):
        return exact(half, inverse) - exact(whole, inverse)

    between = torch.linspace(1 / 8, 8, 200, dtype=torch.float64)
    from_nodes, from_powers = (
        (NODES.weights(between, COARSE) @ values - gap(between)).norm()
        for values in (
            gap(NODES.inverse(COARSE)),
            LADDER.coarse @ gap(LADDER.inverse[::HALVES_EVERY]),
        )
    )
    assert from_powers < 1.1 * from_nodes


def test_a_ladder_does_not_span_nodes_that_are_too_far_apart():
    assert PartitionLadder.reaches(NODES) and PartitionLadder.reaches(Nodes(2.0, 128.0))
    assert not PartitionLadder.reaches(Nodes(0.1, 12.0))
