"""Everything that Scores say, against the full distributions of the same mask samples."""

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

import afterdrop as ad
from afterdrop.errors import ScoresError
from afterdrop.masks.uniforms import Plan
from oracles import family as oracle
from oracles.sampled import sampled_log_probs
from oracles.zoo import mlp

N, V, K = 60, 6, 8
ALPHAS, MULTIPLIERS = (0.0, 0.05, 0.5, 1.0), (0.4, 1.0)


@pytest.fixture(scope="module")
def world():
    torch.manual_seed(0)
    model = mlp(5, 20, V).eval()
    with torch.no_grad():
        model[3].weight.mul_(4)
    x = torch.randn(N, 5) * 2
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=model(x) / 1.5).sample()
    grid = ad.Grid(ALPHAS, (0, *MULTIPLIERS), temper="sample")
    scores = ad.evaluate(model, [(x, y)], grid=grid, num_samples=K, temperatures=(0.125, 8.0))
    lp = {m: sampled_log_probs(model, x, Plan(K), m) for m in MULTIPLIERS}
    with torch.no_grad():
        lp[0] = oracle.log_softmax(model(x).double().numpy())[None]
    return scores, lp, y.numpy()


def members():
    yield ad.DET
    for m in MULTIPLIERS:
        for a in ALPHAS:
            yield ad.Member(a, m)


CASES = [(member, t) for member in members() for t in (1.0, 0.2, 0.7, 1.5, 6.0)]


def close(got, expected, atol=2e-5):
    np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=atol)


def direct(lp, member):
    return oracle.member_log_probs(
        lp[member.multiplier], member.alpha, member.temperature, member.temper
    )


@pytest.mark.parametrize(("member", "temperature"), CASES)
def test_metrics_at_every_temperature(world, member, temperature):
    scores, lp, y = world
    member = member.at_temperature(temperature)
    log_p = direct(lp, member)
    close(scores.values(member).whole, -oracle.at(log_p, y), 1e-4)
    close(scores.xe(member).value, -oracle.at(log_p, y).mean())
    close(scores.perplexity(member).value, np.exp(-oracle.at(log_p, y).mean()), 1e-4)
    close(scores.confidence(member), np.exp(log_p.max(-1)))
    correct = log_p.argmax(-1) == y
    assert scores.accuracy(member).value == pytest.approx(correct.mean())
    close(scores.brier(member).value, oracle.brier(log_p, y).mean())
    close(scores.entropy(member).value, oracle.entropy(log_p).mean(), 2e-4)
    confidence = np.exp(log_p.max(-1))
    close(scores.ece(member).value, oracle.ece_width(confidence, correct, 15), 1e-4)
    close(scores.ece(member, 7, "mass").value, oracle.ece_mass(confidence, correct, 7), 1e-4)


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("temperature", [0.55, 0.8, 1.0, 1.3, 1.9])
def test_metrics_with_the_temperature_on_each_sample(world, alpha, multiplier, temperature):
    scores, lp, y = world
    member = ad.Member(alpha, multiplier, temperature, "sample")
    log_p = oracle.member_log_probs(lp[multiplier], alpha, temperature, "sample")
    close(scores.values(member).whole, -oracle.at(log_p, y), 1e-3)
    close(scores.xe(member).value, -oracle.at(log_p, y).mean(), 1e-4)
    close(scores.confidence(member), np.exp(log_p.max(-1)), 1e-3)
    close(scores.brier(member).value, oracle.brier(log_p, y).mean(), 1e-4)
    close(scores.entropy(member).value, oracle.entropy(log_p).mean(), 1e-3)


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("temper", ["mean", "sample"])
def test_fitted_temperatures(world, alpha, multiplier, temper):
    scores, lp, y = world
    found = scores.fit(ad.Member(alpha, multiplier, temper=temper))

    def xe(t):
        return -oracle.at(oracle.member_log_probs(lp[multiplier], alpha, t, temper), y).mean()

    exact = (
        oracle.best_temperature(xe, 0.5, 2.0)
        if temper == "sample"
        else oracle.temperature_root(oracle.log_power_mean(lp[multiplier], alpha), y, 0.125, 8.0)
    )
    assert not found.at_edge and found.member.temper == temper
    assert found.member.temperature == pytest.approx(exact, rel=1e-4 if temper == "mean" else 2e-3)
    close(scores.xe(found.member).value, xe(exact), 1e-5)


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_bounds(world, alpha, multiplier):
    scores, lp, y = world
    got = scores.bounds(ad.Member(alpha, multiplier))
    objective, bound, jensen, normaliser = oracle.decomposition(lp[multiplier], y, alpha)
    close(got.objective, objective.mean())
    close(got.bound, bound.mean())
    close(got.jensen_gap, jensen.mean())
    close(got.normaliser_gap, normaliser.mean())
    own = oracle.at(lp[multiplier], y)
    close(got.variance, np.exp(own).var(0).mean())
    close(got.mean_probability, np.exp(own).mean())
    p = np.exp(lp[multiplier])
    close(got.normaliser_approximation, (1 - alpha) / 2 * (p.var(0) / p.mean(0)).sum(-1).mean())
    if alpha:
        power = np.exp(alpha * own)
        cv2 = power.var(0) / power.mean(0) ** 2
        close(got.jensen_approximation, (cv2 / (2 * alpha)).mean(), 1e-4)
        r = power / power.mean(0) - 1

        def factor(r):
            return (r - np.log1p(r)) / r**2

        close(got.jensen_lower, (factor(r.max(0)) * cv2 / alpha).mean(), 1e-4)
        close(got.jensen_upper, (factor(r.min(0)) * cv2 / alpha).mean(), 1e-4)
        assert got.jensen_lower <= got.jensen_gap <= got.jensen_upper
    else:
        assert got.jensen_gap == pytest.approx(0, abs=1e-9)
    assert got.objective == pytest.approx(got.bound + got.jensen_gap + got.normaliser_gap)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_bounds_with_the_temperature_on_each_sample(world, alpha, temperature):
    scores, lp, y = world
    got = scores.bounds(ad.Member(alpha, 1.0, temperature, "sample"))
    tempered = oracle.log_softmax(lp[1.0] / temperature)
    expected = [part.mean() for part in oracle.decomposition(tempered, y, alpha)]
    close([got.objective, got.bound, got.jensen_gap, got.normaliser_gap], expected, 2e-4)


@pytest.mark.parametrize("temperature", [0.2, 4.0])
def test_bounds_of_the_geometric_mean_outside_the_bracket_are_refused(world, temperature):
    """They need tempered samples, whose bracket is half as wide on each side."""
    with pytest.raises(ScoresError, match=rf"temperature={temperature:g} lies outside"):
        world[0].bounds(ad.GMC.at_temperature(temperature))


def test_bounds_at_a_temperature_on_the_mean_are_refused(world):
    with pytest.raises(ScoresError, match="temper='sample'"):
        world[0].bounds(ad.AMC.at_temperature(1.5))


def test_deterministic_bounds_have_no_gap(world):
    scores, lp, y = world
    got = scores.bounds(ad.DET)
    assert got.objective == got.bound == pytest.approx(oracle.at(lp[0][0], y).mean(), abs=1e-5)
    assert got.jensen_gap == got.normaliser_gap == got.variance == 0


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_mutual_information(world, multiplier):
    scores, lp, _ = world
    mixture = logsumexp(lp[multiplier], axis=0) - np.log(K)
    expected = (oracle.entropy(mixture) - oracle.entropy(lp[multiplier]).mean(0)).mean()
    assert expected > 0.01
    close(scores.mutual_information(ad.Member(1, multiplier)).value, expected, 2e-4)


@pytest.mark.parametrize("member", [ad.GMC, ad.DET, ad.AMC.at_temperature(2), ad.Member(0.5, 1)])
def test_mutual_information_exists_for_mixtures_only(world, member):
    with pytest.raises(ScoresError, match="mutual information"):
        world[0].mutual_information(member)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_halves_are_the_members_of_the_two_halves_of_the_samples(world, alpha, temperature):
    scores, lp, y = world
    values = scores.values(ad.Member(alpha, 1.0, temperature))
    for half, part in zip(values.halves, (lp[1.0][: K // 2], lp[1.0][K // 2 :])):
        # Away from T = 1 the difference to the whole is interpolated from 11 nodes.
        expected = -oracle.at(oracle.member_log_probs(part, alpha, temperature), y)
        close(half, expected, 1e-5 if temperature == 1 else 5e-3)
    estimate = scores.xe(ad.Member(alpha, 1.0, temperature))
    halves = [
        -oracle.at(oracle.member_log_probs(part, alpha, temperature), y)
        for part in (lp[1.0][: K // 2], lp[1.0][K // 2 :])
    ]
    whole = -oracle.at(oracle.member_log_probs(lp[1.0], alpha, temperature), y)
    close(estimate.corrected, 2 * whole.mean() - np.mean(halves), 1e-4)
    mean = np.sqrt(((halves[0] - halves[1]) ** 2).sum()) / (2 * N)
    excess = np.std(whole - np.mean(halves, 0), ddof=1) / np.sqrt(N)
    close(estimate.mc_error, np.hypot(mean, excess), 1e-4)


def test_logits_times_a_hundred():
    torch.manual_seed(0)
    model = mlp(5, 20, V).eval()
    with torch.no_grad():
        model[3].weight.mul_(300)
    x = torch.randn(N, 5) * 2
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=model(x) / 100).sample()
    scores = ad.evaluate(model, [(x, y)], grid=ad.Grid((0, 1), (1,)), num_samples=K)
    lp = sampled_log_probs(model, x, Plan(K))
    for member in (ad.AMC, ad.GMC):
        for t in (1.0, scores.fit(member).member.temperature):
            at = member.at_temperature(t)
            log_p = oracle.member_log_probs(lp, member.alpha, t)
            np.testing.assert_allclose(
                scores.xe(at).value, -oracle.at(log_p, y.numpy()).mean(), rtol=1e-5
            )
            close(scores.brier(at).value, oracle.brier(log_p, y.numpy()).mean(), 1e-4)
            close(scores.entropy(at).value, oracle.entropy(log_p).mean(), 1e-3)
            close(scores.confidence(at), np.exp(log_p.max(-1)), 1e-4)
    mixture = logsumexp(lp, axis=0) - np.log(K)
    expected = (oracle.entropy(mixture) - oracle.entropy(lp).mean(0)).mean()
    close(scores.mutual_information(ad.AMC).value, expected, 1e-3)


def test_temperatures_outside_the_bracket_are_refused(world):
    for member in (ad.DET, ad.AMC):
        with pytest.raises(ScoresError, match=r"0\.125 to 8"):
            world[0].xe(member.at_temperature(9.0))
    with pytest.raises(ScoresError, match=r"0\.5 to 2"):
        world[0].xe(ad.Member(1, 1, 3.0, "sample"))


def test_entropy_at_one_where_the_bracket_leaves_one_out():
    torch.manual_seed(0)
    model, x, y = mlp(5, 20, V), torch.randn(N, 5), torch.randint(V, (N,))
    scores = ad.evaluate(
        model, [(x, y)], grid=ad.Grid((1,), (1,)), num_samples=K, temperatures=(3.0, 9.0)
    )
    with torch.no_grad():
        expected = oracle.entropy(oracle.log_softmax(model.eval()(x).double().numpy())).mean()
    close(scores.entropy(ad.DET).value, expected, 1e-3)
    assert scores.mutual_information(ad.AMC).value > 0


def test_members_that_were_not_evaluated_are_refused_by_name(world):
    with pytest.raises(ScoresError, match=r"alpha=0\.3"):
        world[0].xe(ad.Member(0.3, 1))
    with pytest.raises(ScoresError, match=r"multiplier=0\.7"):
        world[0].bounds(ad.Member(1, 0.7))


def test_by_frequency(world):
    scores, lp, y = world
    counts = torch.tensor([1, 5, 5, 10, 100, 0])
    rows = scores.by_frequency(ad.AMC, counts, [(0, 5), (5, 1000), (-1, 0), (1000, 2000)])
    own = -oracle.at(oracle.member_log_probs(lp[1.0], 1), y)
    for (low, high), number, estimate in rows:
        inside = (counts.numpy()[y] > low) & (counts.numpy()[y] <= high)
        assert number == inside.sum()
        if number:
            close(estimate.value, own[inside].mean())
        else:
            assert estimate is None
    with pytest.raises(ScoresError, match="counts"):
        scores.by_frequency(ad.AMC, counts[:2], [(0, 5)])


def test_masked_classes_have_probability_zero_everywhere():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(5, 20, V)

        def forward(self, x):
            out = self.inner(x)
            out[:, 0] = -torch.inf
            return out

    model, x = Masked(), torch.randn(N, 5)
    y = torch.randint(1, V, (N,))
    scores = ad.evaluate(model, [(x, y)], grid=ad.Grid((0, 0.05, 1), (1,)), num_samples=K)
    lp = sampled_log_probs(model, x, Plan(K))[..., 1:]
    for alpha in (0, 0.05, 1):
        for t in (1.0, 1.5):
            member = ad.Member(alpha, 1, t)
            log_p = oracle.member_log_probs(lp, alpha, t)
            close(scores.xe(member).value, -oracle.at(log_p, y.numpy() - 1).mean())
            close(scores.entropy(member).value, oracle.entropy(log_p).mean(), 2e-4)
            close(scores.brier(member).value, oracle.brier(log_p, y.numpy() - 1).mean())
    assert np.isfinite(scores.bounds(ad.Member(0.05, 1)).normaliser_approximation)
    mixture = logsumexp(lp, axis=0) - np.log(K)
    expected = (oracle.entropy(mixture) - oracle.entropy(lp).mean(0)).mean()
    close(scores.mutual_information(ad.AMC).value, expected, 2e-4)


def test_an_impossible_target_costs_infinitely_much_and_breaks_nothing():
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(5, 20, V)

        def forward(self, x):
            out = self.inner(x)
            out[:, 0] = -torch.inf
            return out

    y = torch.zeros(N, dtype=torch.long)
    scores = ad.evaluate(
        Masked(), [(torch.randn(N, 5), y)], grid=ad.Grid((0, 0.5, 1), (1,)), num_samples=K
    )
    for member in scores.members:
        assert scores.xe(member).value == np.inf
        assert scores.brier(member).value > 1


def test_curve_over_the_number_of_samples():
    torch.manual_seed(0)
    model, x, y = mlp(5, 20, V), torch.randn(N, 5), torch.randint(V, (N,))
    scores = ad.evaluate(model, [(x, y)], grid=ad.Grid((0, 1), (0.5, 1)), num_samples=16, blocks=8)
    lp = sampled_log_probs(model, x, Plan(16, blocks=8))
    for alpha in (0, 1):
        curve = scores.curve(ad.Member(alpha, 1))
        assert [k for k, _ in curve] == [2, 4, 8, 16]
        for k, estimate in curve:
            parts = np.split(lp, 16 // k)
            expected = np.mean(
                [-oracle.at(oracle.member_log_probs(p, alpha), y.numpy()).mean() for p in parts]
            )
            close(estimate.value, expected)
    assert [k for k, _ in scores.curve(ad.DET)] == [0]
