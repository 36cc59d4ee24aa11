"""Samples from anywhere: exact means, jackknife errors, every way to give them, and refusals."""

import itertools

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import afterdrop as ad
from afterdrop.errors import DataError, FileError
from afterdrop.family.estimates import cluster_sums
from afterdrop.masks.uniforms import Plan
from oracles import family as oracle
from oracles.sampled import sampled_log_probs
from oracles.zoo import mlp

N, V = 40, 4
ALPHAS = (0.0, 0.3, 1.0)
BRACKET = (0.125, 8.0)


def ensemble(k=5, n=N, seed=0, spread=1.0):
    """Log-probabilities [K, N, V] in float64, and targets."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, V, n)
    logits = 0.8 * np.eye(V)[targets] + rng.normal(size=(k, n, V)) * spread
    return oracle.log_softmax(logits), targets


def evaluated(lp, targets, **options):
    options.setdefault("grid", ad.Grid(ALPHAS))
    options.setdefault("temperatures", BRACKET)
    return ad.evaluate_samples(lp, targets, **options)


def losses(lp, targets, alpha, temperature=1.0, temper="mean"):
    return -oracle.at(oracle.member_log_probs(lp, alpha, temperature, temper), targets)


@pytest.mark.parametrize("temper", ["mean", "sample"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_every_power_and_temperature_is_that_of_the_oracle(alpha, temperature, temper):
    lp, targets = ensemble()
    scores = evaluated(lp, targets, grid=ad.Grid(ALPHAS, temper=temper))
    member = ad.Member(alpha, 1.0, temperature, temper)
    expected = losses(lp, targets, alpha, temperature, temper)
    np.testing.assert_allclose(scores.values(member).whole, expected, atol=2e-5)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("k", [2, 3, 5, 12])
def test_bias_and_error_are_those_of_the_jackknife(alpha, k):
    lp, targets = ensemble(k)
    found = evaluated(lp, targets).xe(ad.Member(alpha, 1.0))
    whole = losses(lp, targets, alpha).mean()
    without = [losses(np.delete(lp, i, 0), targets, alpha).mean() for i in range(k)]
    corrected = k * whole - (k - 1) * np.mean(without)
    error = np.sqrt((k - 1) / k * np.square(without - np.mean(without)).sum())
    assert found.value == pytest.approx(whole, abs=1e-6)
    assert found.corrected == pytest.approx(max(corrected, 0), abs=2e-5)
    assert found.mc_error == pytest.approx(error, abs=2e-5)


def test_the_jackknife_error_of_an_ensemble_is_about_the_spread_of_such_ensembles():
    """2,000 ensembles of five members; the ratio has a standard error of about 4 %."""
    rng = np.random.default_rng(1)
    biases = rng.normal(size=(2000, 5, 1, V)) * 0.7  # what distinguishes models on all targets
    targets = rng.integers(0, V, 30)
    logits = 1.5 * np.eye(V)[targets] + biases + rng.normal(size=(1, 1, 30, V))
    lp = oracle.log_softmax(logits)
    xe = np.array([losses(own, targets, 1.0).mean() for own in lp])
    stated = [evaluated(own, targets).xe(ad.AMC).mc_error for own in lp[:150]]
    ratio = np.sqrt(np.mean(np.square(stated))) / xe.std()
    assert 0.85 < ratio < 1.25


def test_many_samples_are_left_out_in_groups():
    lp, targets = ensemble(30)
    plan = evaluated(lp, targets).protocol.plan
    assert (plan.num_samples, plan.blocks, len(plan.spans)) == (30, 12, 12)
    assert sorted(itertools.chain(*plan.spans)) == list(range(30))
    found = evaluated(lp, targets, groups=3).xe(ad.AMC)
    without = [losses(np.delete(lp, range(i, i + 10), 0), targets, 1.0).mean() for i in (0, 10, 20)]
    expected = np.sqrt(2 / 3 * np.square(without - np.mean(without)).sum())
    assert found.mc_error == pytest.approx(expected, abs=2e-5)


def test_scores_of_mask_samples_are_those_of_the_evaluation():
    torch.manual_seed(0)
    model, x = mlp(5, 20, V).eval(), torch.randn(N, 5) * 2
    y = torch.randint(V, (N,))
    grid = ad.Grid(ALPHAS, (0, 1), temper="sample")
    own = ad.evaluate(model, [(x, y)], grid=grid, num_samples=8, temperatures=BRACKET)
    lp = sampled_log_probs(model, x, Plan(8))
    given_ = evaluated(lp, y, grid=grid, groups=2, shared=False)
    for member in own.members[1:]:
        for at in (member, own.fit(member).member):
            same(own.xe(at), given_.xe(at))
        assert given_.bounds(member).bound == pytest.approx(own.bounds(member).bound, abs=1e-6)
        assert given_.fit(member).member.temperature == pytest.approx(
            own.fit(member).member.temperature, rel=1e-4
        )
        for metric in ("accuracy", "brier", "ece", "entropy"):
            one, other = getattr(own, metric)(member), getattr(given_, metric)(member)
            assert one.value == pytest.approx(other.value, abs=2e-6)


def same(one, other):
    for name in ("value", "corrected", "mc_error", "data_error"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), abs=2e-5), name


def test_the_best_sample_alone_takes_the_place_of_the_deterministic_model():
    lp, targets = ensemble()
    scores = evaluated(lp, targets, names="abcde")
    alone = [-oracle.at(one, targets).mean() for one in lp]
    found = scores.protocol.ensemble
    assert found.best == int(np.argmin(alone)) and found.names == tuple("abcde")
    np.testing.assert_allclose(found.single_xe, alone, atol=1e-6)
    assert scores.xe(ad.DET).value == pytest.approx(min(alone), abs=1e-6)
    assert -scores.bounds(ad.AMC).bound == pytest.approx(np.mean(alone), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.floats(0, 6), st.integers(0, 10**6), st.sampled_from((0.0, 0.4, 1.0)))
def test_the_mean_log_likelihood_of_the_members_bounds_every_mean(k, spread, seed, alpha):
    lp, targets = ensemble(k, 6, seed, spread)
    scores = evaluated(lp, targets, grid=ad.Grid((alpha,)))
    bounds = scores.bounds(ad.Member(alpha, 1.0))
    assert bounds.bound == pytest.approx(oracle.at(lp, targets).mean(), rel=1e-6, abs=1e-6)
    assert bounds.jensen_gap >= -1e-6 and bounds.normaliser_gap >= -1e-6
    assert bounds.objective == pytest.approx(
        bounds.bound + bounds.jensen_gap + bounds.normaliser_gap, abs=1e-6
    )
    assert scores.xe(ad.Member(alpha, 1.0)).value <= -bounds.bound + 1e-6


def test_identical_members_gain_nothing_and_have_no_error():
    lp, targets = ensemble(1)
    scores = evaluated(np.repeat(lp, 5, 0), targets)
    for member in scores.members:
        found = scores.xe(member)
        assert found.value == pytest.approx(losses(lp, targets, 1.0).mean(), abs=1e-6)
        assert found.mc_error == pytest.approx(0, abs=1e-6)


def forms(lp, targets, folder):
    """The same samples in every form that they can be given in."""
    np.save(folder / "samples.npy", lp)
    np.save(folder / "targets.npy", targets)
    safetensors.numpy.save_file({"samples": lp, "targets": targets}, folder / "both.safetensors")
    for number, one in enumerate(lp):
        np.save(folder / f"{number}.npy", one)
    files = [folder / f"{number}.npy" for number in range(len(lp))]
    both = folder / "both.safetensors"
    return {
        "torch": (torch.from_numpy(lp), torch.from_numpy(targets)),
        "npy": (folder / "samples.npy", folder / "targets.npy"),
        "safetensors": (str(both), str(both)),
        "members": (list(lp), targets.tolist()),
        "files": (files, targets),
        "list of batches": ([lp[:, :7], lp[:, 7:]], targets),
        "batches": ((part for part in (lp[:, :7], lp[:, 7:])), iter((targets[:7], targets[7:]))),
        "logits": (lp + 3.0, targets),
    }


FORMS = ["torch", "npy", "safetensors", "members", "files", "list of batches", "batches", "logits"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_samples_gives_the_same_scores(form, tmp_path):
    lp, targets = ensemble()
    expected = evaluated(lp, targets)
    found = evaluated(*forms(lp, targets, tmp_path)[form])
    assert found.request == expected.request
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor, atol=1e-6, rtol=0)


def test_a_file_of_python_2_is_read_without_a_warning(tmp_path):
    lp, targets = ensemble(k=3)
    np.save(tmp_path / "s.npy", lp)
    content = (tmp_path / "s.npy").read_bytes()
    (tmp_path / "old.npy").write_bytes(content.replace(b"(3, 40, 4), }  ", b"(3L, 40, 4), } "))
    found = [evaluated(tmp_path / name, targets) for name in ("s.npy", "old.npy")]
    assert b"3L" in (tmp_path / "old.npy").read_bytes()
    assert found[0].xe(ad.AMC) == found[1].xe(ad.AMC)


def test_memory_bounds_how_much_is_read_and_changes_no_number(tmp_path):
    lp, targets = ensemble(4, 3000)
    np.save(tmp_path / "s.npy", lp)
    whole = evaluated(tmp_path / "s.npy", targets)
    parts = evaluated(tmp_path / "s.npy", targets, memory=2**20)
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(parts.tensors[name], tensor, atol=1e-6, rtol=0)


def test_targets_of_several_dimensions_cluster_by_example_and_may_be_ignored():
    lp, targets = ensemble(3, 24)
    y = targets.copy()
    y[5] = -100
    scores = evaluated(lp.reshape(3, 8, 3, V), y.reshape(8, 3))
    assert (scores.num_targets, scores.num_examples) == (23, 8)
    kept = y != -100
    expected = losses(lp[:, kept], y[kept], 1.0)
    np.testing.assert_allclose(scores.values(ad.AMC).whole, expected, atol=2e-5)
    flat = evaluated(lp, y, examples=np.arange(24) // 3)
    assert flat.xe(ad.AMC).data_error == pytest.approx(scores.xe(ad.AMC).data_error)
    assert len(cluster_sums(torch.ones(23).double(), scores.clusters)) == 8


def test_scores_of_samples_are_saved_and_loaded(tmp_path):
    lp, targets = ensemble()
    scores = evaluated(lp, targets)
    scores.save(tmp_path / "scores.safetensors")
    again = ad.Scores.load(tmp_path / "scores.safetensors")
    assert again.protocol == scores.protocol and again.xe(ad.AMC) == scores.xe(ad.AMC)


def holed(lp):
    """The samples with NaN in the fourth."""
    found = lp.copy()
    found[3, 7, 1] = np.nan
    return found


def test_what_cannot_be_evaluated_is_refused(tmp_path):
    lp, targets = ensemble()
    for samples, y, options, message in [
        (lp[:1], targets, {}, "1 sample, whose means.*give at least 2"),
        (lp, targets[:-1], {}, "do not match targets.*one target for each example, in the same"),
        (lp, ["cat"] * N, {}, "targets are list of str, not numbers.*give class numbers"),
        (lp, np.array(["cat"] * N), {}, "targets are an array of <U3, not numbers"),
        (lp[0], targets, {}, "1 sample"),
        (lp[None], targets, {}, r"give \[K, \*targets.shape, V\]"),
        ([lp[0], lp[1][:, :3]], targets, {}, "different shapes"),
        ([lp[:, :3], lp[:2, 3:]], targets, {}, "all must have the same numbers"),
        (np.exp(lp), targets, {}, "gives probabilities"),
        (holed(lp), targets, {}, "^sample 3 gave NaN.*for examples 0 to 39"),
        (lp, targets + 1, {}, "has targets from"),
        (lp, targets, {"groups": 1}, "groups=1 must be from 2"),
        (lp, targets, {"groups": 6}, "groups=6 of 5 given samples"),
        (lp, targets, {"names": "ab"}, "names has 2 entries for 5 samples"),
        (lp, targets, {"single": 5}, "single=5 must be the number of a sample, 0 to 4"),
        (lp, targets, {"examples": [0]}, "one number for each"),
        ([], targets, {}, "samples is empty"),
        (3, targets, {}, "samples is int"),
        (lp.astype(int), targets, {}, "give log-probabilities or logits"),
        (torch.zeros(5, N, V).to(torch.float8_e4m3fn), targets, {}, "samples are torch.float8"),
        (lp[..., :0], targets, {}, "samples have no classes"),
    ]:
        with pytest.raises(DataError, match=message):
            evaluated(samples, y, **options)
    (tmp_path / "broken.npy").write_bytes(b"no array")
    for path in ("broken.npy", "missing.npy", "missing.safetensors"):
        with pytest.raises(FileError, match="is it complete"):
            evaluated(tmp_path / path, targets)
    with pytest.raises(FileError, match=r"must be a \.npy or a"):
        evaluated(tmp_path / "samples.csv", targets)
