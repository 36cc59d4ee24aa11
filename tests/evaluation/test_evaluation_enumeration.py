"""A hidden layer of 8 units has 256 masks: the members of infinitely many samples, exactly."""

import numpy as np
import pytest
import torch

import afterdrop as ad
from oracles import family as oracle
from oracles.sampled import layers
from oracles.zoo import mlp

H, V, RATE = 8, 4, 0.5
ALPHAS, MULTIPLIERS = (0.0, 0.5, 1.0), (0.3, 1.0)


def world(targets=40, seed=0):
    torch.manual_seed(seed)
    model = mlp(3, H, V, RATE).eval()
    with torch.no_grad():
        model[3].weight.mul_(4)
    x, y = torch.randn(targets, 3) * 2, torch.randint(V, (targets,))
    return model, x, y


def exact(model, x, multiplier):
    first, second = layers(model)
    return oracle.enumerate_mlp(x.double().numpy(), first, second, RATE * multiplier)


def exact_xe(model, x, y, member):
    lp, w = exact(model, x, member.multiplier)
    log_p = oracle.member_log_probs(lp, member.alpha, member.temperature, member.temper, w)
    return -oracle.at(log_p, y.numpy()).mean()


@pytest.fixture(scope="module", params=["lhs", "iid", "antithetic"])
def scored(request):
    model, x, y = world()
    grid = ad.Grid(ALPHAS, (0, *MULTIPLIERS))
    scores = ad.evaluate(model, [(x, y)], grid=grid, num_samples=200, masks=request.param)
    return model, x, y, scores


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_corrected_cross_entropy_is_that_of_all_masks(scored, alpha, multiplier, temperature):
    model, x, y, scores = scored
    member = ad.Member(alpha, multiplier, temperature)
    estimate = scores.xe(member)
    true = exact_xe(model, x, y, member)
    assert 0 < estimate.mc_error < 0.03
    # The correction adds noise of its own to that of the value: twice, 4 standard errors.
    assert abs(estimate.corrected - true) < 4 * 2**0.5 * estimate.mc_error + 1e-5


def test_bounds_are_those_of_all_masks(scored):
    model, x, y, scores = scored
    for multiplier in MULTIPLIERS:
        lp, w = exact(model, x, multiplier)
        own = oracle.at(lp, y.numpy())
        for alpha in ALPHAS:
            objective, bound, jensen, normaliser = oracle.decomposition(lp, y.numpy(), alpha, w)
            got = scores.bounds(ad.Member(alpha, multiplier))
            # Pairs that mirror each other count as one sample of what is even in the masks.
            error = (2 * own.var(0).mean() / (200 * len(y))) ** 0.5
            assert got.bound == pytest.approx(bound.mean(), abs=5 * error)
            assert got.jensen_gap == pytest.approx(jensen.mean(), abs=5 * error)
            assert got.normaliser_gap == pytest.approx(normaliser.mean(), abs=5 * error)
            assert got.objective == pytest.approx(objective.mean(), abs=5 * error)
        mean_p = (np.exp(own) * w[:, None]).sum(0)
        variance = (np.exp(2 * own) * w[:, None]).sum(0) - mean_p**2
        spread = variance.mean() ** 0.5 / (200 * len(y)) ** 0.5
        assert got.mean_probability == pytest.approx(mean_p.mean(), abs=5 * spread)
        assert got.variance == pytest.approx(variance.mean(), rel=0.1)


def test_mutual_information_is_that_of_all_masks(scored):
    model, x, _, scores = scored
    lp, w = exact(model, x, 1.0)
    mixture = oracle.log_power_mean(lp, 1, w)
    expected = oracle.entropy(mixture).mean() - (oracle.entropy(lp) * w[:, None]).sum(0).mean()
    assert scores.mutual_information(ad.AMC).value == pytest.approx(expected, abs=0.01)


def runs(num_samples, seeds, masks="iid", member=ad.AMC, targets=40):
    model, x, y = world(targets)
    grid = ad.Grid((member.alpha,), (member.multiplier,))
    return (model, x, y), [
        ad.evaluate(
            model,
            [(x, y)],
            grid=grid,
            num_samples=num_samples,
            seed=s,
            masks=masks,
            temperatures=(0.25, 4.0),
        ).xe(member)
        for s in range(seeds)
    ]


@pytest.mark.parametrize("masks", ["lhs", "iid"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_correction_removes_the_bias_of_few_samples(masks, alpha):
    member = ad.Member(alpha, 1)
    (model, x, y), estimates = runs(4, 60, masks, member)
    true = exact_xe(model, x, y, member)
    plain = np.array([e.value for e in estimates])
    corrected = np.array([e.corrected for e in estimates])
    bias, left = plain.mean() - true, corrected.mean() - true
    error = corrected.std(ddof=1) / 60**0.5
    assert bias > 3 * plain.std(ddof=1) / 60**0.5
    assert abs(left) < 0.4 * bias + 3 * error  # the next order, c/K², stays


@pytest.mark.parametrize("masks", ["lhs", "iid", "antithetic"])
def test_mask_error_is_the_spread_over_seeds(masks):
    _, estimates = runs(8, 80, masks)
    spread = np.var([e.value for e in estimates], ddof=1)
    stated = np.mean([e.mc_error**2 for e in estimates])
    # Relative errors: the variance of 80 values 16 %, the statement 3 %; four of them.
    assert stated == pytest.approx(spread, rel=0.65)


def test_mask_error_where_examples_share_masks():
    class Shared(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.mask = inner, torch.nn.Dropout(RATE)

        def forward(self, x):
            hidden = torch.tanh(self.inner[0](x)) * self.mask(torch.ones(1, H))
            return self.inner[3](hidden)

    model, x, y = world()
    estimates = []
    for s in range(80):
        scores = ad.evaluate(
            Shared(model), [(x, y)], grid=ad.Grid((1,), (1,)), num_samples=8, seed=s, masks="iid"
        )
        assert scores.protocol.shared
        estimates.append(scores.xe(ad.AMC))
    spread = np.var([e.value for e in estimates], ddof=1)
    stated = np.mean([e.mc_error**2 for e in estimates])
    # One difference of halves a run has one degree of freedom: relative error sqrt(2/80) = 16 %.
    assert stated == pytest.approx(spread, rel=0.8)


@pytest.mark.parametrize("k", [4, 8, 64])
def test_at_k_is_what_k_samples_deliver(k):
    model, x, y = world()
    scores = ad.evaluate(model, [(x, y)], grid=ad.Grid((1,), (1,)), num_samples=400, masks="iid")
    forecast = scores.xe(ad.AMC).at(k)
    _, estimates = runs(k, 30 if k < 64 else 6)
    values = np.array([e.value for e in estimates])
    error = values.std(ddof=1) / len(values) ** 0.5
    true = exact_xe(model, x, y, ad.AMC)
    # At k = 4 the next order of the bias is about a tenth of it.
    assert forecast == pytest.approx(
        values.mean(), abs=4 * error + 0.15 * abs(values.mean() - true) + 0.004
    )


def test_predictor_tends_to_the_member_of_all_masks():
    model, x, _ = world()
    lp, w = exact(model, x, 1.0)
    for alpha in ALPHAS:
        got = ad.Predictor(model, ad.Member(alpha, 1), num_samples=2000)(x)
        expected = oracle.member_log_probs(lp, alpha, 1.0, "mean", w)
        np.testing.assert_allclose(got.exp().numpy(), np.exp(expected), atol=0.03)
