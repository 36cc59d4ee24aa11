import dataclasses
import math

import numpy as np
import pytest
import torch

from afterdrop.errors import MemberError
from afterdrop.family.calibration import calibration_bins, calibration_error
from afterdrop.family.estimates import (
    Estimate,
    Values,
    bias_error,
    cluster_sums,
    clustered_error,
    estimate,
    mc_error,
)
from afterdrop.family.member import Member
from afterdrop.family.power_mean import log_power_mean
from oracles.family import clustered_error as oracle_clustered
from oracles.family import ece_mass, ece_width


def values(n=60, k=10, seed=0):
    g = torch.Generator().manual_seed(seed)
    whole = torch.rand(n, generator=g, dtype=torch.float64)
    halves = whole + 0.1 * torch.randn(2, n, generator=g, dtype=torch.float64) + 0.05
    return Values(whole, halves, k)


CLUSTERS = torch.arange(60) // 4


def test_cluster_sums_match_a_loop():
    v = values().halves
    expected = torch.stack([v[:, c == CLUSTERS].sum(1) for c in range(15)], 1)
    torch.testing.assert_close(cluster_sums(v, CLUSTERS), expected)


@pytest.mark.parametrize("seed", range(3))
def test_clustered_error_is_the_sandwich_estimator(seed):
    v = values(seed=seed).whole
    clusters = torch.randint(9, (60,), generator=torch.Generator().manual_seed(seed))
    clusters = clusters.unique(return_inverse=True)[1]
    expected = oracle_clustered(v.numpy(), clusters.numpy())
    assert clustered_error(v, clusters) == pytest.approx(expected)


def test_without_clusters_the_error_is_the_usual_standard_error():
    v = values().whole
    assert clustered_error(v, torch.arange(60)) == pytest.approx(v.std().item() / 60**0.5)


def test_clustered_error_matches_the_spread_of_simulated_means():
    g = torch.Generator().manual_seed(0)
    common = torch.randn(2000, 20, 1, generator=g, dtype=torch.float64)
    draws = (common + 0.5 * torch.randn(2000, 20, 5, generator=g, dtype=torch.float64)).flatten(1)
    clusters = torch.arange(100) // 5
    errors = np.array([clustered_error(row, clusters) for row in draws[:400]])
    assert np.mean(errors**2) == pytest.approx(draws.mean(1).var().item(), rel=0.1)


def test_mask_error_matches_a_loop():
    v = values()
    d = (v.halves[0] - v.halves[1]).numpy()
    sums = np.array([d[CLUSTERS.numpy() == c].sum() for c in range(15)])
    excess = (v.whole - v.halves.mean(0)).numpy()
    spread = oracle_clustered(excess, CLUSTERS.numpy())
    expected = np.sqrt((sums**2).sum() / 120**2 + spread**2)
    assert mc_error(v, CLUSTERS, shared=False) == pytest.approx(expected)
    assert mc_error(v, CLUSTERS, shared=True) == pytest.approx(abs(d.mean()) / 2)
    assert mc_error(Values(v.whole, None, 0), CLUSTERS, shared=False) == 0
    assert math.isnan(mc_error(Values(v.whole, None, 1), CLUSTERS, shared=False))


def test_both_errors_add_up_to_the_total_spread():
    v = values()
    e = estimate(v, CLUSTERS, shared=False)
    assert e.error == pytest.approx(clustered_error(v.whole, CLUSTERS))
    shared = estimate(v, CLUSTERS, shared=True)
    assert shared.data_error == pytest.approx(clustered_error(v.whole, CLUSTERS))
    assert shared.error == pytest.approx(math.hypot(shared.mc_error, shared.data_error))


def test_corrected_and_at_follow_the_formulas():
    v = values()
    e = estimate(v, CLUSTERS, shared=False)
    half = v.halves.mean().item()
    assert e.corrected == pytest.approx(2 * e.value - half)
    assert e.at(10) == e.value
    assert e.at(5) == pytest.approx(half)
    assert e.at(math.inf) == pytest.approx(e.corrected)
    for k in (1, 5, 7, 40):
        assert v.at(k).mean().item() == pytest.approx(e.at(k))


def test_estimates_without_masks_have_one_value():
    e = estimate(Values(values().whole, None, 0), CLUSTERS, shared=False)
    assert e.value == e.corrected == e.at(3) and e.mc_error == 0


def test_differences_are_paired():
    a, b = values(seed=0), values(seed=1)
    d = a.minus(b)
    torch.testing.assert_close(d.whole, a.whole - b.whole)
    torch.testing.assert_close(d.halves, a.halves - b.halves)
    assert estimate(a.minus(a), CLUSTERS, shared=False).error == 0
    det = Values(b.whole, None, 0)
    torch.testing.assert_close(a.minus(det).halves, a.halves - b.whole)


@pytest.mark.parametrize("k", [4, 10, 100, math.inf])
def test_a_difference_at_k_has_the_same_limit_and_extrapolation(k):
    a, b = values(seed=0), values(seed=1)
    plain = estimate(a.minus(b), CLUSTERS, shared=False)
    at = estimate(a.minus(b, k), CLUSTERS, shared=False)
    assert at.value == pytest.approx(plain.at(k))
    assert at.corrected == pytest.approx(plain.corrected)
    if k != math.inf:
        assert at.at(20) == pytest.approx(plain.at(20))


def test_the_mask_error_of_one_sample_is_unknown_in_differences_too():
    one, det = Values(values().whole, None, 1), Values(values(seed=1).whole, None, 0)
    assert math.isnan(mc_error(one.minus(det), CLUSTERS, shared=False))
    assert math.isnan(mc_error(det.minus(one), CLUSTERS, shared=False))


def test_a_single_example_has_no_data_error():
    e = estimate(values(), torch.zeros(60, dtype=torch.long), shared=False)
    assert math.isnan(e.data_error)


@pytest.mark.parametrize("k", [0, -1, math.nan])
def test_a_number_of_samples_that_is_not_positive_is_refused(k):
    e = Estimate(1.0, 0.9, 0.1, 0.1, 10)
    with pytest.raises(MemberError, match="k="):
        e.at(k)


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 40])
@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_matches_a_loop(bins, seed):
    g = torch.Generator().manual_seed(seed)
    confidence = torch.rand(103, generator=g, dtype=torch.float64)
    correct = torch.rand(103, generator=g) < 0.6
    for binning, oracle in (("width", ece_width), ("mass", ece_mass)):
        expected = oracle(confidence.numpy(), correct.numpy(), bins)
        assert calibration_error(confidence, correct, bins, binning) == pytest.approx(expected)
        share, mean, accuracy = calibration_bins(confidence, correct, bins, binning)
        assert share.sum().item() == pytest.approx(1)
        assert (share * mean).sum().item() == pytest.approx(confidence.mean().item())
        assert (share * accuracy).sum().item() == pytest.approx(correct.double().mean().item())


def test_equal_mass_bins_have_equal_mass():
    share, _, _ = calibration_bins(torch.rand(100) ** 4, torch.ones(100).bool(), 10, "mass")
    torch.testing.assert_close(share, torch.full((10,), 0.1, dtype=torch.float64))


def test_confidences_of_0_and_1_fall_into_the_outer_bins():
    share, _, _ = calibration_bins(torch.tensor([0.0, 1.0]), torch.tensor([False, True]), 5)
    assert share.tolist() == [0.5, 0, 0, 0, 0.5]


def test_invalid_bins_are_refused():
    with pytest.raises(MemberError, match="num_bins=0"):
        calibration_error(torch.rand(3), torch.ones(3).bool(), 0)
    with pytest.raises(MemberError, match="binning='depth'"):
        calibration_error(torch.rand(3), torch.ones(3).bool(), 3, "depth")


def test_infinite_values_stay_infinite_at_any_number_of_samples():
    whole = torch.tensor([1.0, math.inf, 2.0], dtype=torch.float64)
    halves = torch.tensor([[1.1, math.inf, math.inf], [1.3, math.inf, 2.5]], dtype=torch.float64)
    values = Values(whole, halves, 10)
    assert values.at(10).tolist() == [1.0, math.inf, 2.0]
    torch.testing.assert_close(values.at(5)[0].item(), 1.2)
    assert values.at(5)[1:].tolist() == [math.inf, math.inf]  # in one half the last is impossible
    torch.testing.assert_close(values.at(math.inf)[0].item(), 0.8)
    assert values.at(math.inf)[1:].tolist() == [math.inf, 2.0]
    found = estimate(values, torch.arange(3), shared=False)
    assert found.value == found.corrected == found.at(5) == math.inf


def test_without_halves_nothing_is_known_of_other_numbers_of_samples():
    found = estimate(Values(values().whole, None, 10), CLUSTERS, shared=False)
    assert math.isnan(found.corrected) and math.isnan(found.at(20)) and found.at(10) == found.value
    assert "corrected" not in str(found) and "K = 10" in str(found)
    deterministic = estimate(Values(values().whole, None, 0), CLUSTERS, shared=False)
    assert deterministic.corrected == deterministic.value


def test_a_single_example_prints_without_nan():
    found = estimate(values(), torch.zeros(60, dtype=torch.long), shared=False)
    assert "nan" not in str(found) and "unknown" in str(found)


def test_a_correction_that_rests_on_halves_far_apart_is_uncertain():
    v = values()
    assert bias_error(v) == 0
    halves = v.halves.clone()
    halves[0, :3] += 4.0
    apart = Values(v.whole, halves, 10)
    expected = (halves.mean(0) - v.whole)[:3].sum().item() / 60
    assert bias_error(apart) == pytest.approx(expected)
    found = estimate(apart, CLUSTERS, shared=False)
    assert found.error_at(math.inf) == pytest.approx(math.hypot(found.error, expected))
    assert found.error_at(20) == pytest.approx(math.hypot(found.error, expected / 2))
    assert found.error_at(10) == found.error
    moved = estimate(apart.moved(20), CLUSTERS, shared=True)
    assert moved.mc_error > expected / 2


@pytest.mark.parametrize(("before", "error"), [(0.2, 0.0), (0.15, 0.1), (0.3, 0.05)])
def test_quarters_of_the_samples_test_the_law(before, error):
    """XE falls by 0.1 from K/2 to K; by the law it fell by 0.2 before and falls by 0.1 more."""
    whole = torch.full((6,), 1.0, dtype=torch.float64)
    law = Values(whole, (whole + 0.1).expand(2, -1), 8, quarters=whole + 0.1 + before)
    assert bias_error(law) == pytest.approx(error, abs=1e-9)


def test_the_limit_of_a_cross_entropy_is_not_negative():
    whole = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    halves = torch.tensor([[9.0, 0.2, 0.3], [0.1, 0.3, 0.3]], dtype=torch.float64)
    found = estimate(Values(whole, halves, 4, floor=0.0), torch.arange(3), shared=False)
    assert 0 <= found.corrected < 1e-8 and found.value == pytest.approx(0.2)
    assert found.at(8) >= 0 and found.bias_error > found.error / 2
    assert "does not fall as 1/K" in str(found)
    assert Values(whole, halves, 4, floor=0.0).moved(16).whole.mean() >= 0


@pytest.mark.parametrize("k", [4, 8])
@pytest.mark.parametrize("rare", [False, True])
def test_differences_between_alphas_are_not_more_certain_than_they_are(k, rare):
    """The logarithms of a mean and of a geometric mean differ by half a variance.

    Its error is nearly right if the variance comes from rare samples, and on the safe side if
    samples are normal: their variance has K/2 − 1 degrees of freedom in a half, where K samples
    have K − 1, and the square of the difference between two halves' means has one.
    """
    generator = torch.Generator().manual_seed(k)
    draws = torch.randn(20_000, k, 20, generator=generator, dtype=torch.float64)
    draws = 0.1 * ((draws.abs() > 2.5).double() if rare else draws)
    whole = {a: mean_of(draws, a) for a in (0.0, 1.0)}
    halves = {a: torch.stack([mean_of(d, a) for d in draws.chunk(2, 1)], 1) for a in whole}
    errors = []
    for i in range(1000):
        a, b = (Values(whole[x][i], halves[x][i], k, member=Member(x, 0.5)) for x in (1.0, 0.0))
        errors.append(mc_error(a.minus(b), torch.arange(20), shared=False))
    found = (whole[1.0] - whole[0.0]).mean(1).var().item()
    expected = 1 + 1 / (k - 1) ** 2 if rare else (k - 1) / (k - 2) + 1 / (k - 1)
    assert np.mean(np.square(errors)) / found == pytest.approx(expected, rel=0.12)


def mean_of(draws, alpha):
    return -log_power_mean(draws, alpha, 1)


def test_two_samples_do_not_show_the_mask_error_between_alphas():
    v = values(k=2)
    a, b = (dataclasses.replace(v, member=Member(x, 0.5)) for x in (0.0, 1.0))
    assert math.isnan(mc_error(a.minus(b), CLUSTERS, shared=False))
    other = dataclasses.replace(v, member=Member(1.0, 0.7))
    assert math.isfinite(mc_error(a.minus(other), CLUSTERS, shared=False))
    moved = dataclasses.replace(values(k=20), member=Member(0.0, 0.5)).moved(2)
    assert math.isfinite(mc_error(moved.minus(moved.moved(2)), CLUSTERS, shared=False))
