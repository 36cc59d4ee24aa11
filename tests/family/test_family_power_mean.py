import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import afterdrop as ad
from afterdrop.errors import DataError, MemberError
from afterdrop.family.power_mean import SMALL_ALPHA, PowerSums
from oracles.family import log_power_mean as oracle
from oracles.family import log_softmax

ALPHAS = (0, 1e-12, 1e-8, 1e-6, 1e-4, 1e-2, 0.1, 0.12499, 0.125, 0.25, 0.5, 0.75, 0.999, 1)


def samples(count=20, shape=(3, 7), scale=3.0, seed=0):
    rng = np.random.default_rng(seed)
    return log_softmax(rng.normal(size=(count, *shape)) * scale)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [0.01, 3.0, 100.0])
def test_float64_matches_the_oracle(alpha, scale):
    lp = samples(scale=scale)
    got = ad.log_power_mean(torch.from_numpy(lp), alpha)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), oracle(lp, alpha), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [0.01, 3.0, 100.0])
def test_float32_is_accurate_to_a_few_units_in_the_last_place(alpha, scale):
    lp = samples(scale=scale).astype(np.float32)
    got = ad.log_power_mean(torch.from_numpy(lp), alpha)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), oracle(lp, alpha), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("chunk", [1, 3, 20])
@pytest.mark.parametrize("scale", [3.0, 100.0])
def test_streaming_matches_the_oracle(alpha, chunk, scale):
    lp = samples(scale=scale).astype(np.float32)
    sums = PowerSums((0.5, alpha) if alpha != 0.5 else (0.5,))
    for part in torch.from_numpy(lp).split(chunk):
        sums.add(part)
    np.testing.assert_allclose(
        sums.log_mean(alpha).numpy(), oracle(lp, alpha), rtol=3e-6, atol=3e-6
    )


def test_half_precision_is_averaged_in_float32():
    lp = torch.from_numpy(samples()).to(torch.bfloat16)
    got = ad.log_power_mean(lp, 0.5)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), oracle(lp.double().numpy(), 0.5), rtol=1e-5)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("alpha", [0, 0.05, 0.5, 1])
def test_any_dimension_can_hold_the_samples(dim, alpha):
    lp = samples()
    got = ad.log_power_mean(torch.from_numpy(lp), alpha, dim=dim)
    np.testing.assert_allclose(got.numpy(), oracle(np.moveaxis(lp, dim, 0), alpha), rtol=1e-10)


def test_the_mean_is_continuous_at_alpha_zero():
    lp = torch.from_numpy(samples(scale=10.0)).float()
    zero = ad.log_power_mean(lp, 0)
    for alpha in (1e-4, 1e-6, 1e-8, 1e-10, 1e-12):
        # d log M / dα at 0 is half the variance of log p.
        slope = lp.var(0, unbiased=False) / 2
        near = ad.log_power_mean(lp, alpha)
        assert ((near - zero).abs() <= 1.5 * slope * alpha + 1e-5).all()


@pytest.mark.parametrize("alpha", [1e-20, 1e-37, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_powers_give_the_geometric_mean(alpha, dtype):
    lp = torch.from_numpy(samples()).to(dtype)
    sums = PowerSums((alpha,))
    sums.add(lp)
    zero = ad.log_power_mean(lp, 0)
    torch.testing.assert_close(ad.log_power_mean(lp, alpha), zero, rtol=0, atol=1e-4)
    torch.testing.assert_close(sums.log_mean(alpha), zero, rtol=0, atol=1e-4)


def test_the_mean_is_continuous_where_the_two_forms_meet():
    lp = torch.from_numpy(samples(scale=100.0)).float()
    below, above = (ad.log_power_mean(lp, SMALL_ALPHA * f) for f in (1 - 1e-6, 1 + 1e-6))
    torch.testing.assert_close(below, above, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_classes_of_probability_zero_are_not_nan(alpha):
    lp = samples().astype(np.float32)
    lp[:, 0, 1] = -np.inf  # never possible
    lp[3, 1, 2] = -np.inf  # impossible in one sample
    lp[:-1, 2, 0] = -np.inf  # possible in the last sample only
    got = ad.log_power_mean(torch.from_numpy(lp), alpha)
    sums = PowerSums((alpha,))
    for part in torch.from_numpy(lp).split(3):
        sums.add(part)
    for result in (got, sums.log_mean(alpha)):
        assert result[0, 1] == -torch.inf
        assert not result.isnan().any()
        if alpha >= 0.1:
            np.testing.assert_allclose(result.numpy(), oracle(lp, alpha), rtol=1e-5, atol=1e-5)
        elif alpha == 0:
            assert result[1, 2] == -torch.inf
        else:
            assert result[1, 2] < -0.04 / alpha


def test_states_with_only_zero_probabilities_can_be_merged():
    lp = torch.full((4, 2), -torch.inf)
    a, b = PowerSums((0.05, 0.5, 1.0)), PowerSums((0.05, 0.5, 1.0))
    a.add(lp)
    b.add(torch.tensor([[-1.0, -torch.inf]]))
    a.merge(b)
    for alpha in a.alphas:
        got = a.log_mean(alpha)
        expected = oracle(np.array([[-np.inf]] * 4 + [[-1.0]]), alpha if alpha > 0.1 else 0.1)
        assert got[1] == -torch.inf
        if alpha > 0.1:
            assert got[0].item() == pytest.approx(float(expected[0]), rel=1e-5)
        else:
            assert got[0].item() == pytest.approx(-1 + np.log(0.2) / alpha, rel=1e-4)


splits = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(splits, st.integers(0, 2**31), st.floats(0.1, 200), st.booleans())
def test_chunking_and_merging_do_not_change_the_mean(sizes, seed, scale, drop):
    lp = torch.from_numpy(samples(sum(sizes), (5,), scale, seed)).float()
    if drop:
        lp[0, 0] = -torch.inf
    alphas = (0.0, 1e-6, 0.1, 0.5, 1.0, 2.0)
    streamed, merged = PowerSums(alphas), PowerSums(alphas)
    for part in lp.split(sizes):
        streamed.add(part)
        fresh = PowerSums(alphas)
        fresh.add(part)
        merged.merge(fresh)
    for alpha in alphas:
        whole = ad.log_power_mean(lp, alpha, bounded=False)
        for sums in (streamed, merged):
            assert sums.count == len(lp)
            torch.testing.assert_close(sums.log_mean(alpha), whole, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lowest", [-30.0, -60.0, -200.0, -torch.inf])
@pytest.mark.parametrize("at", [0, 7, 19])
def test_sums_become_relative_to_a_peak_when_plain_sums_would_underflow(lowest, at):
    lp = samples(shape=(3, 40, 500)).astype(np.float32)
    lp[at, 1, 33, 7:9] = lowest
    lp[:, 2, 5, 3] = lowest
    alphas = (0.25, 0.5, 1.0, 2.0)
    streamed, merged = PowerSums(alphas, entropy=True), PowerSums(alphas, entropy=True)
    for part in torch.from_numpy(lp).split(4):
        assert streamed.peak is None or lowest < -40
        streamed.add(part)
        fresh = PowerSums(alphas, entropy=True)
        fresh.add(part)
        merged.merge(fresh)
    assert (streamed.peak is None) == (merged.peak is None) == (lowest > -40)
    with np.errstate(invalid="ignore"):
        p = np.exp(lp.astype(np.float64))
        entropy = -np.where(p > 0, p * lp, 0.0).sum((0, -1))
    for sums in (streamed, merged):
        for alpha in alphas:
            found = sums.log_mean(alpha).numpy()
            np.testing.assert_allclose(found, oracle(lp, alpha), rtol=3e-6, atol=3e-6)
        np.testing.assert_allclose(sums.entropy.numpy(), entropy, rtol=1e-5)


def test_reading_does_not_change_the_state():
    sums = PowerSums((0.0, 0.05, 0.5))
    sums.add(torch.from_numpy(samples()).float())
    for alpha in sums.alphas:
        assert torch.equal(sums.log_mean(alpha), sums.log_mean(alpha))


def test_adding_does_not_change_the_samples():
    lp = torch.from_numpy(samples()).float()
    before = lp.clone()
    sums = PowerSums((0.0, 0.05, 0.5))
    sums.add(lp[:1])
    sums.add(lp[1:])
    ad.log_power_mean(lp, 0.05), ad.log_power_mean(lp, 0.5)
    assert torch.equal(lp, before)


@pytest.mark.parametrize("alpha", [0, 0.05, 0.5, 1])
def test_gradients_match_finite_differences(alpha):
    lp = torch.from_numpy(samples(4, (3,))).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ad.log_power_mean(x, alpha), (lp,))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, 2, float("nan"), float("inf"), "1", None, True])
def test_powers_outside_their_domain_are_refused(alpha):
    with pytest.raises(MemberError, match="alpha"):
        ad.log_power_mean(torch.zeros(2, 2), alpha)


@pytest.mark.parametrize("alpha", [-1.0, -0.5, -0.01, 1.5, 2.0])
def test_unbounded_powers_match_the_oracle(alpha):
    lp = samples()
    got = ad.log_power_mean(torch.from_numpy(lp), alpha, bounded=False)
    np.testing.assert_allclose(got.numpy(), oracle(lp, alpha), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("tensor", "dim"),
    [
        (torch.zeros(0, 3), 0),
        (torch.zeros(3, 0), 1),
        (torch.tensor(0.0), 0),
        (torch.zeros(2, 2).int(), 0),
    ],
)
def test_tensors_without_samples_are_refused(tensor, dim):
    with pytest.raises(DataError, match="log_probs"):
        ad.log_power_mean(tensor, 0.5, dim=dim)


def test_reading_an_empty_state_is_refused():
    with pytest.raises(DataError, match="samples"):
        PowerSums((0.5,)).log_mean(0.5)
