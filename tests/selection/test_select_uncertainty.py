"""Uncertainty of each example: its formulas restated in NumPy, all masks of small nets, errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import afterdrop as ad
from afterdrop.errors import MemberError
from afterdrop.selection.uncertainty import Uncertainty, UncertaintySums
from oracles import family as oracle
from oracles.sampled import layers
from oracles.zoo import AWD, ConvNet, mlp

MEMBERS = [
    ad.Member(alpha, 1, temperature, temper)
    for alpha in (0.0, 0.05, 0.5, 1.0)
    for temperature, temper in ((1.0, "mean"), (0.7, "mean"), (1.6, "sample"))
]
FIELDS = ("confidence", "predictive_entropy", "expected_entropy", "disagreement")


def divergence(lp, q, alpha):
    """D_α(p ‖ q) by its definition, in the last dimension."""
    if alpha == 0:
        return (np.exp(q) * (q - lp)).sum(-1)
    if alpha == 1:
        return (np.exp(lp) * (lp - q)).sum(-1)
    return (1 - np.exp(alpha * lp + (1 - alpha) * q).sum(-1)) / (alpha * (1 - alpha))


def restated(lp, member, w=None):
    """All quantities in float64 from the samples [K, N, V] that a member averages."""
    w = np.full(len(lp), 1 / len(lp)) if w is None else w
    inverse = 1 / member.temperature if member.temper == "mean" else 1.0
    power_mean = oracle.log_power_mean(lp, member.alpha, w)
    log_probs, q = oracle.log_softmax(power_mean * inverse), oracle.log_softmax(power_mean)
    p, mean = np.exp(lp), (np.exp(lp) * w[:, None, None]).sum(0)
    return {
        "log_probs": log_probs,
        "confidence": np.exp(log_probs).max(-1),
        "predictive_entropy": oracle.entropy(log_probs),
        "expected_entropy": (oracle.entropy(lp) * w[:, None]).sum(0),
        "disagreement": (divergence(lp, q, member.alpha) * w[:, None]).sum(0),
        "variance": ((p - mean) ** 2 * w[:, None, None]).sum(0),
    }


def assert_is(found, expected, atol=2e-6):
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name).numpy(), value, atol=atol, err_msg=name)


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_every_quantity_is_that_of_the_samples(member):
    torch.manual_seed(0)
    predict, x = ad.Predictor(mlp(5, 20, 4), member, num_samples=8, seed=3), torch.randn(6, 5)
    lp, found = predict.samples(x).double().numpy(), predict.uncertainty(x)
    assert lp.shape == (8, 6, 4)
    assert_is(found, restated(oracle.log_softmax(lp), member))
    torch.testing.assert_close(found.log_probs, predict(x), rtol=0, atol=1e-6)


def test_mutual_information_is_that_of_baal_and_small_text():
    torch.manual_seed(1)
    predict, x = ad.Predictor(mlp(5, 20, 4), ad.AMC, num_samples=8), torch.randn(6, 5)
    p, found = predict.samples(x).exp().double().numpy(), predict.uncertainty(x)
    # baal: natural logarithms of probabilities [N, V, K], whose limit at 0 is 0; the variance is
    # that of the population, averaged over the classes.
    last = p.transpose(1, 2, 0)
    mean = last.mean(-1)
    bald = -(mean * np.log(mean)).sum(-1) + (last * np.log(last)).sum(1).mean(-1)
    np.testing.assert_allclose(found.mutual_information.numpy(), bald, atol=1e-6)
    variance = found.variance.mean(-1).numpy()
    np.testing.assert_allclose(variance, last.var(-1).mean(-1), atol=1e-7)
    np.testing.assert_allclose(found.confidence.numpy(), mean.max(-1), atol=1e-6)
    # small-text: probabilities [N, K, V], in bits, and 1e-8 inside the logarithm.
    middle, eps = p.transpose(1, 0, 2), 1e-8
    mean = middle.mean(1)
    bits = -(mean * np.log2(mean + eps)).sum(-1)
    bits += (middle * np.log2(middle + eps)).sum(-1).mean(1)
    np.testing.assert_allclose(found.mutual_information.numpy() / np.log(2), bits, atol=2e-6)


def all_masks(units=8):
    torch.manual_seed(0)
    model, x = mlp(3, units, 4, 0.5).eval(), torch.randn(30, 3) * 2
    with torch.no_grad():
        model[3].weight.mul_(4)
    lp, w = oracle.enumerate_mlp(x.double().numpy(), *layers(model), 0.5)
    return model, x, lp, w


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_sums_over_all_masks_are_exact(alpha):
    _, _, lp, _ = all_masks()
    member = ad.Member(alpha, 1)
    sums = UncertaintySums(member)
    for block in torch.from_numpy(lp).split(64):  # every mask is as likely at a rate of 0.5
        for chunk in block.split(24):
            sums.add(chunk, "the input")
        sums.end_block()
    assert_is(sums.result(), restated(lp, member), atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("multiplier", [0.4, 1.0])
def test_predictors_tend_to_the_values_of_all_masks(alpha, multiplier):
    model, x, _, _ = all_masks()
    lp, w = oracle.enumerate_mlp(x.double().numpy(), *layers(model), 0.5 * multiplier)
    member = ad.Member(alpha, multiplier)
    predict = ad.Predictor(model, member, 4096, masks="iid", blocks=16, per_example=True)
    found, expected = predict.uncertainty(x), restated(lp, member, w)
    for name in FIELDS:
        gap = getattr(found, name).numpy() - expected[name]
        error = getattr(found.errors, name).numpy()
        # Errors of 15 degrees of freedom, 720 of them in all: 6 is exceeded in one test of 60.
        assert (np.abs(gap) < 6 * error + 1e-5).all(), name


@pytest.mark.parametrize("masks", ["lhs", "iid"])
@pytest.mark.parametrize("member", [ad.AMC, ad.GMC], ids=str)
def test_errors_are_the_spread_over_seeds(masks, member):
    model, x, _, _ = all_masks()
    runs = [
        ad.Predictor(model, member, 32, seed, masks=masks, per_example=True).uncertainty(x)
        for seed in range(40)
    ]
    for name in (*FIELDS, "log_probs", "variance"):
        values = torch.stack([getattr(run, name) for run in runs]).double()
        stated = torch.stack([getattr(run.errors, name) for run in runs]).double()
        spread = values.var(0).mean().sqrt().item()
        # Blocks of 16 samples are a little more variable, per sample, than the 32 together.
        assert stated.square().mean().sqrt().item() == pytest.approx(spread, rel=0.35), name


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.integers(0, 2**31), st.floats(0.1, 6))
def test_disagreement_is_the_least_mean_divergence(alpha, seed, scale):
    rng = np.random.default_rng(seed)
    lp = oracle.log_softmax(rng.normal(size=(5, 3, 4)) * scale)
    member = ad.Member(alpha, 1)
    sums = UncertaintySums(member)
    sums.add(torch.from_numpy(lp), "the input")
    sums.end_block()
    found = sums.result()
    assert found.errors is None and bool((found.disagreement >= 0).all())
    if alpha in (0, 1) or 0.01 < alpha < 0.99:  # the definition itself cancels elsewhere
        q = oracle.log_softmax(oracle.log_power_mean(lp, alpha))
        least = divergence(lp, q, alpha).mean(0)
        np.testing.assert_allclose(found.disagreement.numpy(), least, atol=1e-4)
        other = oracle.log_softmax(q + 0.3 * rng.normal(size=q.shape))
        assert (divergence(lp, other, alpha).mean(0) >= least - 1e-9).all()


def test_disagreement_is_continuous_in_alpha():
    _, _, lp, _ = all_masks(6)

    def disagreement(alpha):
        sums = UncertaintySums(ad.Member(alpha, 1))
        sums.add(torch.from_numpy(lp), "the input")
        return sums._block.uncertainty().disagreement

    torch.testing.assert_close(disagreement(0.999), disagreement(1.0), rtol=0.01, atol=1e-3)
    torch.testing.assert_close(disagreement(1e-3), disagreement(0.0), rtol=0.01, atol=1e-3)


def test_mutual_information_is_refused_where_it_does_not_exist():
    model, x = mlp(), torch.randn(4, 5)
    cases = {
        ad.Member(0, 1): "mean KL divergence from the geometric mean to the samples",
        ad.Member(0.5, 1): "mean alpha-divergence .* alpha = 0.5",
        ad.Member(1, 1, 1.5): "mutual information of the samples",
        ad.Member(1, 1, 1.5, "sample"): "mutual information of the tempered samples",
    }
    for member, measure in cases.items():
        found = ad.Predictor(model, member, 4).uncertainty(x)
        with pytest.raises(MemberError, match=f"needs alpha=1.*is the {measure}"):
            _ = found.mutual_information
        with pytest.raises(MemberError, match="does not exist"):
            _ = found.errors.mutual_information


def test_without_dropout_there_is_no_disagreement():
    model, x = mlp(), torch.randn(4, 5)
    for temperature in (1.0, 2.0):
        predict = ad.Predictor(model, ad.DET.at_temperature(temperature))
        found = predict.uncertainty(x)
        assert torch.equal(found.log_probs, predict(x))
        assert torch.equal(predict.samples(x), predict(x)[None])
        assert torch.equal(found.expected_entropy, found.predictive_entropy)
        assert not found.disagreement.any() and not found.variance.any()
        assert not found.errors.confidence.any()
    assert not ad.Predictor(model, ad.DET).uncertainty(x).mutual_information.any()


def test_one_sample_shows_no_error():
    found = ad.Predictor(mlp(), ad.AMC, 1).uncertainty(torch.randn(4, 5))
    assert found.errors is None
    torch.testing.assert_close(found.mutual_information, torch.zeros(4), rtol=0, atol=1e-6)


def test_impossible_classes_have_no_error():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(5, 9, 4)

        def forward(self, x):
            return self.inner(x).index_fill(-1, torch.tensor([2]), float("-inf"))

    for alpha in (0.0, 0.5, 1.0):
        found = ad.Predictor(Masked(), ad.Member(alpha, 1), 8).uncertainty(torch.randn(3, 5))
        assert not found.errors.log_probs[:, 2].any() and not found.variance[:, 2].any()
        for name in FIELDS:
            assert getattr(found, name).isfinite().all()
            assert getattr(found.errors, name).isfinite().all()


def class_axis_cases():
    image = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(6, 3, 1))
    volume = nn.Sequential(nn.Conv3d(1, 6, 3, padding=1), nn.Dropout3d(0.5), nn.Conv3d(6, 3, 1))
    yield "image", image, torch.randn(4, 2, 5, 6), {"class_dim": 1}
    yield "volume", volume, torch.randn(3, 1, 4, 5, 6), {"class_dim": 1}
    own = {"rates": AWD.RATES, "batch_dim": 1, "class_dim": -1}
    yield "time-major", AWD(), torch.randint(13, (5, 6)), own
    yield "pooled", ConvNet(), torch.randn(7, 1, 8, 8), {}


@pytest.mark.parametrize("case", list(class_axis_cases()), ids=lambda case: case[0])
@pytest.mark.parametrize("memory", [None, 2**20])
def test_shapes_are_those_of_the_logits(case, memory):
    _, model, x, options = case
    predict = ad.Predictor(model, ad.AMC, 8, memory=memory, **options)
    log_probs, lp, found = predict(x), predict.samples(x), predict.uncertainty(x)
    class_dim = options.get("class_dim", -1) % log_probs.dim()
    assert lp.shape == (8, *log_probs.shape)
    torch.testing.assert_close(lp.logsumexp(0) - np.log(8), log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.log_probs, log_probs, rtol=0, atol=1e-5)
    assert found.variance.shape == found.errors.variance.shape == log_probs.shape
    of_targets = log_probs.select(class_dim, 0).shape
    assert {getattr(found, name).shape for name in FIELDS} == {of_targets}
    assert {getattr(found.errors, name).shape for name in FIELDS} == {of_targets}
    last = lp.movedim(class_dim + 1, -1).flatten(1, -2).double().numpy()
    expected = restated(oracle.log_softmax(last), ad.AMC)["disagreement"]
    np.testing.assert_allclose(found.mutual_information.flatten().numpy(), expected, atol=1e-5)


def test_streamed_samples_are_all_samples_in_order():
    model, x = ConvNet(), torch.randn(40, 1, 8, 8)
    predict = ad.Predictor(model, ad.Member(0.5, 0.7, 1.5, "sample"), 16, memory=2**20)
    chunks = list(predict.stream_samples(x))
    assert len(chunks) > 2 and {chunk.shape[1:] for chunk in chunks} == {(40, 3)}
    whole = ad.Predictor(model, ad.Member(0.5, 0.7, 1.5, "sample"), 16).samples(x)
    torch.testing.assert_close(torch.cat(chunks), whole, rtol=0, atol=1e-5)


def test_the_model_is_free_between_chunks_of_a_stream():
    model, x = ConvNet().train(), torch.randn(40, 1, 8, 8)
    predict = ad.Predictor(model, ad.AMC, 16, memory=2**20)
    stream = predict.stream_samples(x)
    first = next(stream)
    assert model.training and all(module.training for module in model.modules())
    torch.testing.assert_close(predict.samples(x)[: len(first)], first, rtol=0, atol=1e-5)
    stream.close()


def test_uncertainty_holds_few_samples_at_a_time(monkeypatch):
    sizes, add = [], UncertaintySums.add

    def noted(self, logits, where):
        sizes.append(logits.shape[0] * logits.shape[1])
        add(self, logits, where)

    monkeypatch.setattr(UncertaintySums, "add", noted)
    model, x = ConvNet(), torch.randn(64, 1, 8, 8)
    ad.Predictor(model, ad.AMC, 64, memory=2**20).uncertainty(x)
    assert max(sizes) <= 64 * 64 / 16


def test_parts_without_errors_join():
    part = UncertaintySums(ad.AMC)
    part.add(torch.randn(1, 2, 3), "the input")
    part.end_block()
    joined = Uncertainty.join([part.result(), part.result()], 0)
    assert joined.errors is None and joined.log_probs.shape == (4, 3)
