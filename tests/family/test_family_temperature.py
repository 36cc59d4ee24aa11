import math

import numpy as np
import pytest
import torch

import afterdrop as ad
from afterdrop.errors import MemberError
from afterdrop.family.temperature import (
    WIDEST,
    Nodes,
    bracket,
    fit_interpolated,
    fit_temperature,
    partitions,
)
from oracles.family import at, best_temperature, log_softmax, temperature_root
from oracles.zoo import mlp


def problem(classes, targets=400, scale=1.0, truth=1.7, seed=0):
    """Logits whose best temperature is near `truth · scale`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(targets, classes)) * 2
    p = np.exp(log_softmax(logits / truth))
    y = np.array([rng.choice(classes, p=row) for row in p])
    return logits * scale, y


def fit(log_means, y, nodes):
    G, peak = partitions(log_means, nodes.inverse())
    below = log_means.gather(-1, y.unsqueeze(-1)).squeeze(-1) - peak
    t, edge = fit_temperature(G.double().mean(-1)[None], below.double().mean()[None], nodes)
    return t.item(), bool(edge)


@pytest.mark.parametrize("classes", [2, 10, 100, 5000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("truth", [0.6, 1.7])
def test_fit_matches_a_float64_optimum(classes, scale, truth):
    logits, y = problem(classes, 200 if classes == 5000 else 400, scale, truth)
    lp32 = torch.from_numpy(logits).float().log_softmax(-1)
    nodes = bracket(lp32, torch.from_numpy(y))
    got, edge = fit(lp32, torch.from_numpy(y), nodes)
    exact = temperature_root(lp32.double().numpy(), y, nodes.low, nodes.high)
    assert exact is not None and not edge
    assert got == pytest.approx(exact, rel=1e-4)
    by_scipy = best_temperature(
        lambda t: -at(log_softmax(lp32.double().numpy() / t), y).mean(), nodes.low, nodes.high
    )
    assert got == pytest.approx(by_scipy, rel=2e-4)  # scipy's own limit, since a minimum is flat


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_fit_through_evaluate_matches_the_float64_optimum(seed, scale):
    logits, y = problem(10, 300, scale, 1.3, seed)
    x = torch.from_numpy(logits).float()
    model = torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Identity())
    scores = ad.evaluate(
        model,
        [(x, torch.from_numpy(y))],
        grid=ad.Grid((0, 0.5, 1), (0, 1)),
        num_samples=8,
        seed=seed,
    )
    low, high = scores.protocol.low, scores.protocol.high
    found = scores.fit(ad.DET)
    exact = temperature_root(log_softmax(x.double().numpy()), y, low, high)
    assert not found.at_edge
    assert found.member.temperature == pytest.approx(exact, rel=1e-4)
    predict = ad.Predictor(model, ad.AMC, num_samples=8)
    assert predict(x).shape == x.shape


def test_every_member_has_its_own_fit():
    model, x = mlp(5, 30, 4), torch.randn(200, 5) * 3
    with torch.no_grad():
        model[3].weight.mul_(8)
        y = torch.distributions.Categorical(logits=model.eval()(x) / 2).sample()
    scores = ad.evaluate(model, [(x, y)], grid=ad.Grid((0, 1), (1,)), num_samples=8)
    fits = [scores.fit(m) for m in (ad.DET, ad.GMC, ad.AMC)]
    assert not any(f.at_edge for f in fits)
    # Before a linear layer GMC with Latin hypercubes equals DET; AMC is another model.
    assert abs(fits[2].member.temperature - fits[0].member.temperature) > 0.1
    for best in (f.member for f in fits):
        for factor in (0.99, 1.01):
            near = best.at_temperature(best.temperature * factor)
            assert scores.xe(near).value > scores.xe(best).value


@pytest.mark.parametrize("truth", [0.02, 60.0])
def test_an_optimum_beyond_the_bracket_is_reported_at_its_edge(truth):
    logits, y = problem(5, 400, 1.0, truth)
    lp = torch.from_numpy(logits).log_softmax(-1)
    nodes = Nodes(0.5, 2.0)
    got, edge = fit(lp, torch.from_numpy(y), nodes)
    assert edge
    assert got == pytest.approx(0.5 if truth < 1 else 2.0, rel=1e-6)


def test_data_without_mistakes_is_fitted_at_the_lower_edge():
    lp = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=torch.float64).log_softmax(-1)
    got, edge = fit(lp, torch.tensor([0, 1]), Nodes(0.125, 8.0))
    assert edge and got == pytest.approx(0.125)


def test_resamples_fitted_together_match_separate_fits():
    values, targets, alone = [], [], []
    nodes = Nodes(0.25, 4.0)
    for seed in range(4):
        logits, y = problem(6, 200, 1.0, 1.3, seed)
        lp = torch.from_numpy(logits).log_softmax(-1)
        G, peak = partitions(lp, nodes.inverse())
        values.append(G.mean(-1))
        targets.append((lp.gather(-1, torch.from_numpy(y)[:, None])[:, 0] - peak).mean())
        alone.append(fit(lp, torch.from_numpy(y), nodes)[0])
    together, edge = fit_temperature(torch.stack(values), torch.stack(targets), nodes)
    assert together.tolist() == pytest.approx(alone) and not edge.any()


@pytest.mark.parametrize("classes", [2, 50, 5000])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_interpolated_partitions_are_accurate(classes, scale):
    logits, _ = problem(classes, 50, scale)
    lp = log_softmax(logits)
    nodes = Nodes(scale / 8, scale * 8)
    G, peak = partitions(torch.from_numpy(lp).float(), nodes.inverse())
    for t in np.geomspace(nodes.low / 2, nodes.high, 23):
        weights = nodes.weights(torch.tensor(1 / t))
        assert weights.sum().item() == pytest.approx(1)
        exact = np.log(np.exp((lp - lp.max(-1, keepdims=True)) / t).sum(-1))
        np.testing.assert_allclose((weights @ G.double()).numpy(), exact, rtol=0, atol=5e-5)
    torch.testing.assert_close(peak.double(), torch.from_numpy(lp.max(-1)), rtol=1e-6, atol=1e-6)


def test_interpolation_is_exact_at_the_nodes_and_for_polynomials():
    nodes = Nodes(0.25, 4.0)
    b = nodes.inverse()
    assert torch.equal(nodes.weights(b), torch.eye(41, dtype=torch.float64))
    some = torch.tensor([0.3, 1.0, 2.5, 7.9], dtype=torch.float64)
    torch.testing.assert_close(nodes.weights(some) @ b.log() ** 3, some.log() ** 3)
    coarse = nodes.inverse(4)
    assert len(coarse) == 11
    torch.testing.assert_close(coarse, b[::4])
    torch.testing.assert_close(nodes.weights(some, 4) @ coarse.log() ** 3, some.log() ** 3)


@pytest.mark.parametrize(
    "pair", [(0, 1), (1, 1), (2, 1), (-1, 1), (1, math.inf), (math.nan, 1), (0.01, 11)]
)
def test_invalid_brackets_are_refused(pair):
    with pytest.raises(MemberError, match="temperatures"):
        Nodes(*pair)


def test_impossible_classes_add_nothing_to_partitions():
    lp = torch.tensor([[0.5, 0.25, 0.0]]).log()
    G, peak = partitions(lp, torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(
        (G[:, 0] + torch.tensor([1.0, 2.0]) * peak).exp(), torch.tensor([0.75, 0.3125])
    )


def test_bracket_follows_the_scale_of_the_logits():
    for exponent in range(-3, 5):
        logits, y = problem(10, 500, 4.0**exponent, 1.0)
        nodes = bracket(torch.from_numpy(logits).log_softmax(-1), torch.from_numpy(y))
        assert nodes.low < 4.0**exponent < nodes.high


@pytest.mark.parametrize("targets", [16, 256, 4096])
def test_a_first_batch_without_mistakes_keeps_ordinary_temperatures_inside(targets):
    # Easy targets (p = 0.7 each) have their optimum at 0; that of the data may be elsewhere.
    lp = torch.tensor([[0.7, 0.3]]).log().expand(targets, 2)
    nodes = bracket(lp, torch.zeros(targets, dtype=torch.long))
    assert nodes.low < 1 < nodes.high


def test_an_empty_batch_gives_the_default_bracket():
    nodes = bracket(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))
    assert (nodes.low, nodes.high) == (0.125, 8.0)


@pytest.mark.parametrize("best", [0.6, 1.0, 1.7])
def test_interpolated_fit_finds_the_lower_of_two_minima(best):
    nodes = Nodes(0.5, 2.0, 13, 1.0)
    s, low = nodes.inverse().log(), -math.log(best)
    values = (s - low) ** 2 * (0.5 + 0.1 * s)
    t, edge = fit_interpolated(values[None], nodes)
    assert t.item() == pytest.approx(best, rel=1e-4) and not edge
    two = ((s - 0.4) ** 2 - 0.02) * ((s + 0.4) ** 2 - 0.03)
    dense = torch.linspace(-0.69, 0.69, 20001, dtype=torch.float64)
    exact = dense[(((dense - 0.4) ** 2 - 0.02) * ((dense + 0.4) ** 2 - 0.03)).argmin()]
    assert fit_interpolated(two[None], nodes)[0].log().item() == pytest.approx(
        -exact.item(), abs=2e-4
    )


def test_interpolated_fit_reports_the_edge():
    nodes = Nodes(0.5, 2.0, 13, 1.0)
    t, edge = fit_interpolated(torch.stack([nodes.inverse(), -nodes.inverse()]), nodes)
    assert t.tolist() == pytest.approx([2.0, 0.5]) and edge.all()


def test_impossible_targets_do_not_affect_the_bracket():
    logits, y = problem(5, scale=4.0)
    lp, targets = torch.tensor(logits).log_softmax(-1), torch.tensor(y)
    without = bracket(lp, targets)
    masked = lp.clone()
    masked[0, targets[0]] = -math.inf
    assert bracket(masked, targets) == without == Nodes(0.5, 32.0)
    lp[:, 1] = -math.inf
    assert bracket(lp, torch.ones_like(targets)) == Nodes(0.125, 8.0)  # nothing is possible


@pytest.mark.parametrize("scale", [0.4, 40.0])
@pytest.mark.parametrize("targets", [1, 15])
def test_few_examples_without_mistakes_give_the_default_bracket(scale, targets):
    logits = torch.tensor([[scale, 0.0]]).expand(targets, 2)
    classes = torch.zeros(targets, dtype=torch.int64)
    assert bracket(logits.log_softmax(-1), classes) == Nodes(0.125, 8.0)
    assert bracket(logits.log_softmax(-1).repeat(16, 1), classes.repeat(16)) != Nodes(0.125, 8.0)


@pytest.mark.parametrize("margin", [2.0, 6.0, 10.0, 14.0])
def test_data_without_mistakes_reports_the_edge_in_spite_of_rounding(margin):
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(50, 5)), dtype=torch.float32)
    logits[:, 0] = logits.amax(-1) + margin
    scores = ad.evaluate(
        Given(logits), [(torch.arange(50), torch.zeros(50, dtype=torch.int64))], num_samples=2
    )
    found = scores.fit(ad.DET)
    assert found.at_edge and found.member.temperature == pytest.approx(0.125)


class Given(torch.nn.Module):
    """Given logits per example; its only dropout site drops zeros."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.dropout = torch.nn.Parameter(logits), torch.nn.Dropout(0.1)

    def forward(self, numbers):
        found = self.logits[numbers]
        return found + self.dropout(torch.zeros_like(found))


def test_impossible_targets_do_not_affect_the_fit():
    logits, y = problem(5)
    logits, targets = torch.tensor(logits).float(), torch.tensor(y)
    data = [(torch.arange(len(y)), targets)]
    options = {"num_samples": 2, "temperatures": (0.125, 8.0), "grid": ad.Grid((1,), (0, 1))}
    wanted = ad.evaluate(Given(logits), [(data[0][0][1:], targets[1:])], **options).fit(ad.DET)
    masked = logits.clone()
    masked[0, targets[0]] = -math.inf
    scores = ad.evaluate(Given(masked), data, **options)
    found = scores.fit(ad.DET)
    assert found.member.temperature == pytest.approx(wanted.member.temperature, rel=1e-5)
    assert scores.xe(found.member).value == math.inf
    everyone = torch.ones(1, len(y), dtype=torch.float64)
    assert scores.fit_weighted(ad.DET, everyone)[1].item() == math.inf
    everyone[0, 0] = 0
    assert math.isfinite(scores.fit_weighted(ad.DET, everyone)[1].item())


def test_the_widest_bracket_gives_xe_within_5e_5():
    torch.manual_seed(0)
    lp, y = (3 * torch.randn(300, 2000)).log_softmax(-1), torch.randint(2000, (300,))
    nodes = Nodes(WIDEST**-0.5, WIDEST**0.5)
    G, peak = partitions(lp, nodes.inverse())
    below = (peak - lp.gather(1, y.unsqueeze(1)).squeeze(1)).double()
    for temperature in (0.5, 1.0, 2.0, 4.0):
        b = torch.tensor(1 / temperature, dtype=torch.float64)
        found = nodes.weights(b) @ G.double() + b * below
        wanted = torch.nn.functional.cross_entropy(lp.double() * b, y)
        assert found.mean().item() == pytest.approx(wanted.item(), abs=5e-5)
