import math

import numpy as np
import pytest
import torch

from afterdrop.errors import MemberError
from afterdrop.family.calibration import calibration_bins, calibration_error
from afterdrop.family.estimates import (
    Estimate,
    Values,
    cluster_sums,
    clustered_error,
    estimate,
    mc_error,
)
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
    assert mc_error(v, CLUSTERS, shared=False) == pytest.approx(np.sqrt((sums**2).sum()) / 120)
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
