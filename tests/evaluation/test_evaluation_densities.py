"""Gaussian, squared-error and a user's own likelihood, against SciPy's integrals."""

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, MemberError, ScoresError
from afterdrop.evaluation.likelihoods.parametric import Gaussian
from afterdrop.evaluation.scores.density_metrics import quantile_calibration
from afterdrop.masks.uniforms import Plan
from oracles.densities import Counts, Density, gaussians, poissons
from oracles.poisson import Poisson
from oracles.sampled import sampled_outputs

GRID = ad.Grid((0, 0.3, 0.5, 1), (0, 0.5, 1))
K, N = 6, 9


class Heads(nn.Module):
    """A network with as many outputs as a likelihood needs."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Dropout(0.4))
        self.mean, self.variance, self.kind = nn.Linear(24, 1), nn.Linear(24, 1), kind

    def forward(self, x):
        features = self.body(x)
        mean = self.mean(features).squeeze(-1)
        if self.kind != "gaussian":
            return mean
        return mean, nn.functional.softplus(self.variance(features)).squeeze(-1) + 0.02


def data(kind, count=N):
    torch.manual_seed(4)
    x = torch.randn(count, 4)
    y = torch.randn(count) * 0.7
    if kind == "poisson":
        y = torch.poisson(torch.full((count,), 2.0))
    return [(x, y)]


def evaluated(kind, **options):
    likelihood = Poisson() if kind == "poisson" else kind
    options = {"grid": GRID, "num_samples": K, "likelihood": likelihood, **options}
    return ad.evaluate(Heads(kind), data(kind), **options)


def samples_of(kind, multiplier):
    """Parameters [K, N, P] of the samples of `evaluated`."""
    first = {"gaussian": 0}.get(kind)
    outputs = sampled_outputs(Heads(kind), data(kind)[0][0], Plan(K, 0), multiplier, first)
    pairs = [out if isinstance(out, tuple) else (out,) for out in outputs]
    return np.stack([np.stack([t.double().numpy() for t in pair], -1) for pair in pairs])


@pytest.fixture(scope="module")
def scores():
    return {kind: evaluated(kind) for kind in ("gaussian", "squared_error", "poisson")}


def oracle(kind, member, target, noise=1.0):
    """The member's distribution of one target."""
    samples = samples_of(kind, member.multiplier)[:, target]
    if kind == "poisson":
        return Counts(poissons(np.exp(samples[:, 0])), member.alpha, member.temperature)
    if kind == "squared_error":
        variances = np.full(K, noise)
        return Density(
            gaussians(samples[:, 0], variances), member.alpha, member.temperature, "sample"
        )
    temper = member.temper
    return Density(gaussians(*samples.T), member.alpha, member.temperature, temper)


MEMBERS = [
    ad.Member(alpha, multiplier, temperature)
    for alpha, multiplier, temperature in [
        (0, 0.5, 1.0),
        (0.3, 1, 1.0),
        (0.5, 0.5, 1.0),
        (1, 1, 1.0),
        (0, 1, 1.7),
        (0.5, 1, 0.6),
        (1, 1, 2.2),
    ]
]


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
@pytest.mark.parametrize("kind", ["gaussian", "squared_error", "poisson"])
def test_members_are_those_of_integrals(scores, kind, member):
    found = scores[kind]
    noise = found.noise_variance if kind == "squared_error" else 1.0
    for target in (0, 4):
        y = found.targets[target].item()
        wanted = oracle(kind, member, target, noise)
        assert found.values(member).whole[target].item() == pytest.approx(wanted.nll(y), abs=2e-5)
        for field in ("mean", "variance"):
            got = found.summary(member, f"{field}_at")[target].item()
            assert got == pytest.approx(getattr(wanted, field), rel=1e-3)
        got = found.summary(member, "crps_at")[target].item()
        assert got == pytest.approx(wanted.crps(y), abs=1e-5 if kind != "poisson" else 1e-3)
    assert found.quadrature_error(member) < 1e-6


def test_temperatures_on_each_sample_are_those_of_integrals():
    scores = evaluated("gaussian", grid=ad.Grid((0.5, 1), (0, 1), "sample"))
    for member in (ad.Member(0.5, 1, 1.6, "sample"), ad.Member(1, 1, 0.7, "sample")):
        y = scores.targets[2].item()
        wanted = oracle("gaussian", member, 2)
        assert scores.values(member).whole[2].item() == pytest.approx(wanted.nll(y), abs=2e-5)
        bounds = scores.bounds(member)
        assert bounds.jensen_gap > 0 and bounds.normaliser_gap >= -1e-5
        total = bounds.bound + bounds.jensen_gap + bounds.normaliser_gap
        assert bounds.objective == pytest.approx(total, abs=1e-9)
    assert scores.xe(ad.AMC) == scores.xe(ad.Member(1, 1, 1, "sample"))
    with pytest.raises(ScoresError, match="temper='mean'"):
        scores.values(ad.AMC.at_temperature(1.6))


def test_a_users_own_likelihood_can_temper_each_sample():
    """Without a closed form, samples are normalised by sums."""
    scores = evaluated("poisson", grid=ad.Grid((0.5,), (0, 1), "sample"))
    member = ad.Member(0.5, 1, 1.5, "sample")
    y, points = int(scores.targets[1]), np.arange(400)
    lp = np.stack([s.logpmf(points) for s in poissons(np.exp(samples_of("poisson", 1.0)[:, 1, 0]))])
    p = np.exp(lp / 1.5) / np.exp(lp / 1.5).sum(-1, keepdims=True)
    mean = (p**0.5).mean(0) ** 2
    wanted = -np.log(mean[y] / mean.sum())
    assert scores.values(member).whole[1].item() == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("kind", ["gaussian", "squared_error", "poisson"])
def test_the_bound_and_both_gaps_hold(scores, kind):
    for member in scores[kind].members[1:]:
        b = scores[kind].bounds(member)
        assert b.objective == pytest.approx(b.bound + b.jensen_gap + b.normaliser_gap, abs=1e-9)
        assert b.jensen_gap >= -1e-7 and b.normaliser_gap >= -1e-7
        if member.alpha == 1:
            assert b.normaliser_gap == pytest.approx(0, abs=1e-7)
        if kind != "squared_error":
            assert b.jensen_lower - 1e-9 <= b.jensen_gap <= b.jensen_upper + 1e-9


def test_temperature_is_fitted(scores):
    """At alpha 0 and without dropout the best temperature is a mean of squares."""
    found = scores["gaussian"]
    mean, variance = (t.detach() for t in Heads("gaussian").eval()(data("gaussian")[0][0]))
    wanted = ((found.targets - mean).square() / variance).mean().item()
    assert found.fit(ad.DET).member.temperature == pytest.approx(wanted, rel=1e-4)


def test_noise_is_fitted(scores):
    found = scores["squared_error"]
    mean = Heads("squared_error").eval()(data("squared_error")[0][0]).detach()
    error = (found.targets - mean).square().mean().item()
    assert found.noise_variance == pytest.approx(error, rel=1e-6)
    assert found.fit(ad.DET).member.temperature == pytest.approx(1.0, rel=1e-4)
    means = samples_of("squared_error", 0.5)[..., 0].mean(0)
    wanted = np.mean((found.targets.numpy() - means) ** 2)
    best = found.fit(ad.Member(0, 0.5)).member.temperature * found.noise_variance
    assert best == pytest.approx(wanted, rel=1e-4)


def test_deterministic_metrics_are_those_of_the_textbook(scores):
    found = scores["gaussian"]
    (x, y), *_ = data("gaussian")
    mean, variance = (t.detach().double() for t in Heads("gaussian").eval()(x))
    normal = torch.distributions.Normal(mean, variance.sqrt())
    assert found.xe(ad.DET).value == pytest.approx(-normal.log_prob(y).mean().item(), abs=1e-6)
    assert found.rmse(ad.DET).value == pytest.approx((y - mean).square().mean().sqrt().item())
    z = (y - mean) / variance.sqrt()
    unit = torch.distributions.Normal(0.0, 1.0)
    crps = variance.sqrt() * (
        z * (2 * unit.cdf(z) - 1) + 2 * unit.log_prob(z).exp() - 1 / np.sqrt(np.pi)
    )
    assert found.crps(ad.DET).value == pytest.approx(crps.mean().item(), abs=1e-5)
    inside = (z.abs() <= 1.6448536).double().mean().item()
    assert found.coverage(ad.DET, 0.9).value == pytest.approx(inside)
    width = (2 * 0.6744898 * variance.sqrt()).mean().item()
    assert found.width(ad.DET, 0.5).value == pytest.approx(width, rel=1e-4)
    levels, shares = quantile_calibration(found, ad.DET)
    wanted = (normal.cdf(y).unsqueeze(-1) <= levels).double().mean(0)
    assert shares.equal(wanted)
    gap = (shares - levels).abs().mean().item()
    assert found.calibration_error(ad.DET).value == pytest.approx(gap)
    entropy = normal.entropy().mean().item()
    assert found.entropy(ad.DET).value == pytest.approx(entropy, abs=1e-6)
    assert found.mutual_information(ad.AMC).value > 0


def test_means_of_quantiles(scores):
    found = scores["gaussian"]
    means, variances = samples_of("gaussian", 0.5).transpose(2, 0, 1)
    normal = torch.distributions.Normal(
        torch.tensor(means.mean(0)), torch.tensor(np.sqrt(variances).mean(0))
    )
    wanted = -normal.log_prob(found.targets).mean().item()
    assert found.quantile_average(0.5).xe(ad.DET).value == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(ScoresError, match="'poisson': its likelihood has no `quantile_mean`"):
        scores["poisson"].quantile_average(0.5)
    with pytest.raises(ScoresError, match="they are its members of alpha 0"):
        scores["squared_error"].quantile_average(0.5)


class Own(Gaussian):
    """A user's likelihood with means of quantiles, of a model that returns a pair."""

    name = "own"


def test_a_users_own_likelihood_may_have_means_of_quantiles(scores, tmp_path):
    (x, y), *_ = data("gaussian")
    options = {"grid": GRID, "num_samples": K, "likelihood": Own()}
    found = ad.evaluate(Heads("gaussian"), [(x, y)], **options)
    wanted = scores["gaussian"].quantile_average(0.5).values(ad.DET).whole
    assert found.quantile_average(0.5).values(ad.DET).whole.equal(wanted)
    for own in (found, scores["poisson"]):
        own.save(tmp_path / "valid.safetensors")
        read = ad.Scores.load(tmp_path / "valid.safetensors")
        assert read.tensors.keys() == own.tensors.keys()


@pytest.mark.parametrize("kind", ["gaussian", "squared_error", "poisson"])
@pytest.mark.parametrize("member", [ad.DET.at_temperature(1.3), *MEMBERS], ids=repr)
def test_predictions_are_the_evaluated_distributions(scores, kind, member):
    found, (x, y) = scores[kind], data(kind)[0]
    options = {"likelihood": Poisson() if kind == "poisson" else kind}
    if kind == "squared_error":
        options["noise_variance"] = found.noise_variance
    predict = ad.Predictor(Heads(kind), member, K, per_example=True, **options)
    if not member.deterministic:  # key the masks as an evaluation does
        predict._find_sites(((x,), {}), len(x))
        predict._by_position = True
    made = predict(x)
    nll = found.values(member).whole
    assert torch.allclose(-made.log_prob(y), nll, atol=2e-5)
    assert torch.allclose(made.mean, found.summary(member, "mean_at"), rtol=1e-3)
    assert torch.allclose(made.variance, found.summary(member, "variance_at"), rtol=1e-3)
    shares = torch.tensor([0.05, 0.4, 0.8]).unsqueeze(-1)
    back = made.cdf(made.quantile(shares))
    if kind == "poisson":
        assert (back >= shares - 1e-9).all() and (
            made.cdf(made.quantile(shares) - 1) < shares
        ).all()
    else:
        assert torch.allclose(back, shares.expand_as(back).double(), atol=1e-6)
    drawn = made.sample((4000,), torch.Generator().manual_seed(0))
    assert drawn.shape == (4000, N)
    error = (drawn.mean(0) - made.mean).abs() / (made.variance / 4000).sqrt()
    assert error.max() < 4.5


def test_quantile_averages_are_a_predictors_alternative(scores):
    (x, y), *_ = data("gaussian")
    made = ad.Predictor(
        Heads("gaussian"), ad.Member(1, 0.5), K, likelihood="gaussian", average="quantile"
    )
    made._find_sites(((x,), {}), len(x))
    made._by_position = True
    wanted = scores["gaussian"].quantile_average(0.5).values(ad.DET).whole
    assert torch.allclose(-made(x).log_prob(y), wanted, atol=1e-6)
    with pytest.raises(MemberError, match="not defined for poisson"):
        ad.Predictor(Heads("poisson"), ad.AMC, K, likelihood=Poisson(), average="quantile")(x)


@pytest.mark.parametrize("kind", ["gaussian", "squared_error", "poisson"])
def test_a_choice_predicts_after_its_files_were_read(scores, kind, tmp_path):
    scores[kind].save(tmp_path / "valid.safetensors")
    loaded = ad.Scores.load(tmp_path / "valid.safetensors")
    choice = ad.select(loaded, resamples=10)
    choice.save(tmp_path)
    choice = ad.Choice.load(tmp_path)
    given = {"likelihood": Poisson()} if kind == "poisson" else {}
    made = choice.predictor(Heads(kind), **given)(data(kind)[0][0])
    assert made.mean.shape == (N,)
    if kind == "poisson":
        with pytest.raises(DataError, match="'poisson' is not built in"):
            choice.predictor(Heads(kind))
    request = choice.test_request("test")
    assert request.noise_variance == (loaded.noise_variance if kind == "squared_error" else None)


@pytest.mark.parametrize("blocks", [2, 4])
def test_curves_over_samples_and_merged_parts(blocks):
    (x, y), *_ = data("gaussian")
    options = {"grid": GRID, "num_samples": 8, "likelihood": "gaussian", "blocks": blocks}
    model = Heads("gaussian")
    whole = ad.evaluate(model, [(x, y)], **options)
    bracket = whole.protocol.low, whole.protocol.high
    parts = [
        ad.evaluate(model, [(x[a:b], y[a:b])], first_example=a, temperatures=bracket, **options)
        for a, b in ((0, 4), (4, N))
    ]
    merged = ad.Scores.merge(parts)
    for name, tensor in whole.tensors.items():
        assert torch.allclose(merged.tensors[name], tensor, rtol=1e-4, atol=1e-5), name
    assert len(whole.curve(ad.AMC)) == (2 if blocks == 2 else 3)
    assert [k for k, _ in whole.curve(ad.AMC)][-1] == 8


def test_targets_that_are_nan_do_not_count():
    (x, y), *_ = data("squared_error")
    holes = y.clone()
    holes[2] = float("nan")
    found = ad.evaluate(
        Heads("squared_error"), [(x, holes)], grid=GRID, num_samples=4, likelihood="squared_error"
    )
    assert found.num_targets == N - 1 and found.examples.tolist() == [0, 1, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("kind", ["gaussian", "squared_error", "poisson"])
def test_a_batch_without_any_target_adds_nothing(scores, kind):
    (x, y), *_ = data(kind)
    likelihood = Poisson() if kind == "poisson" else kind
    options = {"grid": GRID, "num_samples": K, "likelihood": likelihood}
    found = ad.evaluate(Heads(kind), [(x, y), (x, y * float("nan"))], **options)
    for name, tensor in scores[kind].tensors.items():
        assert torch.allclose(found.tensors[name], tensor, rtol=1e-4, atol=1e-5), name
    first = ad.evaluate(Heads(kind), [(x, y * float("nan")), (x, y)], **options)
    assert first.num_targets == N and first.examples.min() == N


@pytest.mark.parametrize("shape", [(N, 1), (N, 2)])
def test_several_numbers_per_example(shape):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, shape[1]))
    y = torch.randn(shape)
    target = y.squeeze(-1) if shape[1] == 1 else y  # [B, 1] outputs of [B] targets
    scores = ad.evaluate(
        net, [(torch.randn(N, 4), target)], grid=GRID, num_samples=4, likelihood="squared_error"
    )
    assert scores.num_targets == y.numel() and scores.num_examples == N


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"likelihood": "gaussian", "kind": "squared_error"}, r"returns \(mean, variance\)"),
        ({"logits": lambda out: (out[0], -out[1])}, "give variances above 0"),
        ({"logits": lambda out: (out[0] * float("nan"), out[1])}, "NaN or infinite outputs"),
        ({"logits": lambda out: (out[0].repeat(2), out[1].repeat(2))}, "targets of shape"),
        ({"likelihood": Gaussian()}, "give it another name"),
    ],
)
def test_what_cannot_be_read_is_refused(change, message):
    options = {"grid": GRID, "num_samples": 4, "likelihood": "gaussian", **change}
    model = Heads(options.pop("kind", "gaussian"))
    with pytest.raises(DataError, match=message):
        ad.evaluate(model, data("gaussian"), **options)


def test_targets_may_lack_a_last_dimension_of_one():
    """As `evaluate` takes them."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    (x, y), *_ = data("squared_error")
    options = {"likelihood": "squared_error", "noise_variance": 1.0}
    made = ad.Predictor(net, ad.AMC, 4, **options)(x)
    assert made.mean.shape == (N, 1)
    for method in (made.log_prob, made.cdf):
        assert method(y).shape == (N, 1) and torch.equal(method(y), method(y.unsqueeze(-1)))


@pytest.mark.parametrize("kind", ["gaussian", "poisson"])
def test_nan_has_no_quantile_and_no_probability(kind):
    options = {"likelihood": Poisson() if kind == "poisson" else kind}
    made = ad.Predictor(Heads(kind), ad.AMC, 4, **options)(data(kind)[0][0])
    y = torch.ones(N)
    y[2] = float("nan")
    for found in (made.cdf(y), made.log_prob(y)):
        assert found.isnan().nonzero().flatten().tolist() == [2]
    for share in (float("nan"), 1.5):
        with pytest.raises(MemberError, match=r"share=(nan|1.5): a quantile needs probabilities"):
            made.quantile(share)


def test_averages_that_do_not_exist_are_refused():
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    with pytest.raises(MemberError, match="average='foo' must be 'power' or 'quantile'"):
        ad.Predictor(Heads("gaussian"), ad.AMC, 4, likelihood="gaussian", average="foo")
    with pytest.raises(MemberError, match="likelihood='categorical' predicts classes"):
        ad.Predictor(net, ad.AMC, 4, average="quantile")
    batches = [(torch.randn(8, 4), torch.randint(3, (8,)))]
    scores = ad.evaluate(net, batches, grid=ad.Grid((0, 1), (0, 1)), num_samples=4)
    with pytest.raises(MemberError, match="predicts classes"):
        ad.select(scores, folds=0, resamples=0).predictor(net, average="quantile")


def test_counts_below_zero_are_refused_by_their_likelihood():
    (x, y), *_ = data("poisson")
    with pytest.raises(DataError, match="negative counts, which poisson does not allow"):
        ad.evaluate(Heads("poisson"), [(x, y - 5)], likelihood=Poisson(), num_samples=4)


def test_fractions_are_no_counts():
    with pytest.raises(DataError, match="needs counts"):
        ad.evaluate(Heads("poisson"), data("gaussian"), likelihood=Poisson(), num_samples=4)


def test_metrics_of_classes_and_numbers_are_not_mixed_up(scores):
    with pytest.raises(ScoresError, match="numbers, not classes"):
        scores["gaussian"].accuracy(ad.DET)
    with pytest.raises(ScoresError, match="no classes"):
        scores["gaussian"].by_frequency(ad.DET, torch.ones(2), [(0, 1)])
    with pytest.raises(ScoresError, match=r"levels 0\.5 and 0\.9"):
        scores["gaussian"].width(ad.DET, 0.8)
    with pytest.raises(ScoresError, match="no noise variance"):
        _ = scores["gaussian"].noise_variance
