"""The inequalities and identities of the family, for any samples."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import afterdrop as ad
from afterdrop.family.bounds import gap_factor, jensen_bounds, variance_of_probability
from afterdrop.family.temperature import Nodes, fit_temperature, partitions
from oracles import family as oracle

alphas = st.floats(1e-12, 1) | st.sampled_from([0.0, 1e-12, 1e-8, 1e-3, 0.125, 0.5, 1.0])


wide, narrow = st.floats(1e-3, 30), st.floats(1e-3, 1e-2)


@st.composite
def samples(draw, spread=wide):
    """Log-probabilities [K, N, V] in float64."""
    count, classes = draw(st.integers(1, 12)), draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.normal(size=(1, 4, classes)) * draw(st.floats(0, 5))
    return torch.from_numpy(
        oracle.log_softmax(base + rng.normal(size=(count, 4, classes)) * draw(spread))
    )


@settings(max_examples=150, deadline=None)
@given(samples(), alphas, alphas)
def test_power_means_rise_with_alpha_and_lie_between_the_extremes(lp, a, b):
    low, high = (ad.log_power_mean(lp, x) for x in sorted((a, b)))
    scale = 1e-9 + 1e-12 * lp.abs().amax(0)
    assert (low <= high + scale).all()
    assert (high <= lp.amax(0) + scale).all() and (low >= lp.amin(0) - scale).all()


@settings(max_examples=150, deadline=None)
@given(samples(), alphas)
def test_normaliser_is_at_most_one_and_one_for_the_arithmetic_mean(lp, alpha):
    log_z = ad.log_power_mean(lp, alpha).logsumexp(-1)
    assert (log_z <= 1e-9).all()
    assert ad.log_power_mean(lp, 1).logsumexp(-1).abs().max() < 1e-9


@settings(max_examples=150, deadline=None)
@given(samples(), alphas)
def test_objective_is_the_bound_plus_two_gaps_that_are_not_negative(lp, alpha):
    y = np.zeros(4, dtype=int)
    log_mean = ad.log_power_mean(lp, alpha)
    bound = lp[:, :, 0].mean(0)
    jensen, normaliser = log_mean[:, 0] - bound, -log_mean.logsumexp(-1)
    scale = 1e-9 * (1 + lp.abs().max())
    assert (jensen >= -scale).all() and (normaliser >= -scale).all()
    objective, *parts = oracle.decomposition(lp.numpy(), y, alpha)
    np.testing.assert_allclose(objective, sum(parts), atol=1e-9)
    np.testing.assert_allclose(
        (log_mean.log_softmax(-1)[:, 0]).numpy(), objective, rtol=1e-7, atol=1e-7
    )
    np.testing.assert_allclose(jensen.numpy(), parts[1], rtol=1e-6, atol=1e-6)


@settings(max_examples=150, deadline=None)
@given(samples(), st.floats(1e-6, 1) | st.sampled_from([1e-8, 0.125, 0.5, 1.0]))
def test_liao_and_berg_bounds_hold(lp, alpha):
    own = lp[:, :, 0]
    log_mean, log_second = (ad.log_power_mean(own, a, bounded=False) for a in (alpha, 2 * alpha))
    gap = log_mean - own.mean(0)
    approximation, lower, upper = jensen_bounds(
        alpha, log_mean, log_second, own.amin(0), own.amax(0)
    )
    slack = 1e-9 * (1 + own.abs().amax(0)) / min(1.0, alpha * 1e3) + 1e-6 * gap
    assert (lower <= gap + slack).all()
    assert (gap <= upper + slack).all()
    assert (approximation >= 0).all()


@settings(max_examples=80, deadline=None)
@given(samples(spread=narrow), st.sampled_from([0.25, 0.5, 1.0]))
def test_approximations_tend_to_the_gaps_at_small_variance(lp, alpha):
    own = lp[:, :, 0]
    log_mean, log_second = (ad.log_power_mean(own, a, bounded=False) for a in (alpha, 2 * alpha))
    gap = log_mean - own.mean(0)
    approximation, lower, upper = jensen_bounds(
        alpha, log_mean, log_second, own.amin(0), own.amax(0)
    )
    torch.testing.assert_close(approximation, gap, rtol=0.1, atol=1e-9)
    torch.testing.assert_close(lower, upper, rtol=0.1, atol=1e-9)
    p = lp.exp()
    normaliser = -ad.log_power_mean(lp, alpha).logsumexp(-1)
    second = (1 - alpha) / 2 * (p.var(0, unbiased=False) / p.mean(0)).sum(-1)
    torch.testing.assert_close(second, normaliser, rtol=0.1, atol=1e-8)


@settings(max_examples=100, deadline=None)
@given(st.floats(-1 + 1e-9, 1e6))
def test_gap_factor_follows_its_formula_and_decreases(r):
    got = gap_factor(torch.tensor([r, r + 1e-3 * (1 + abs(r))], dtype=torch.float64))
    assert got[0] > got[1] > 0
    if abs(r) > 1e-2:
        assert math.isclose(got[0].item(), (r - math.log1p(r)) / r**2, rel_tol=1e-9)


@settings(max_examples=80, deadline=None)
@given(samples())
def test_variance_follows_from_two_power_means(lp):
    one, two = (ad.log_power_mean(lp, a, bounded=False) for a in (1, 2))
    expected = lp.exp().var(0, unbiased=False)
    torch.testing.assert_close(variance_of_probability(one, two), expected, rtol=1e-6, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 40), st.floats(0.2, 5))
def test_fitted_temperature_is_never_beaten(seed, classes, truth):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(150, classes)) * 2
    p = np.exp(oracle.log_softmax(logits / truth))
    y = np.array([rng.choice(classes, p=row) for row in p])
    lp = torch.from_numpy(oracle.log_softmax(logits))
    nodes = Nodes(0.125, 8.0)
    G, peak = partitions(lp, nodes.inverse())
    below = (lp.gather(-1, torch.from_numpy(y)[:, None])[:, 0] - peak).mean()
    t, edge = fit_temperature(G.mean(-1)[None], below[None], nodes)

    def xe(t):
        return -oracle.at(oracle.log_softmax(lp.numpy() / t), y).mean()

    best = xe(t.item())
    for other in np.geomspace(0.125, 8, 61):
        assert best <= xe(other) + 1e-7
    exact = oracle.temperature_root(lp.numpy(), y, 0.125, 8.0)
    if exact is None:
        assert bool(edge)
    else:
        assert math.isclose(t.item(), exact, rel_tol=1e-4)


@settings(max_examples=60, deadline=None)
@given(samples(), alphas, st.floats(0.2, 5), st.sampled_from(["mean", "sample"]))
def test_both_tempers_agree_at_alpha_zero(lp, alpha, t, temper):
    mean = oracle.member_log_probs(lp.numpy(), 0, t, "mean")
    sample = oracle.member_log_probs(lp.numpy(), 0, t, "sample")
    np.testing.assert_allclose(mean, sample, atol=1e-9)
    assert ad.Member(0, 1, t, "sample") == ad.Member(0, 1, t, "mean")
    again = ad.Member(alpha, 1, t, temper)
    assert ad.Member(again.alpha, again.multiplier, again.temperature, again.temper) == again
