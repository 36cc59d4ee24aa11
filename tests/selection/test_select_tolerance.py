"""Predictors that stop at a standard error: the error, what they return, and what they spend."""

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import Plan
from afterdrop.selection.member_mean import MemberMean
from oracles import family as oracle

MEMBERS = [ad.Member(a, 1.0, T, temper) for a, T, temper in (
    (0.0, 1.0, "mean"), (0.002, 1.5, "mean"), (0.5, 0.8, "mean"), (1.0, 2.0, "sample")
)]  # fmt: skip


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 40), nn.Tanh(), nn.Dropout(0.5), nn.Linear(40, 4)]
    return nn.Sequential(*layers).eval(), 3 * torch.randn(12, 5)


@pytest.mark.parametrize("member", MEMBERS)
def test_the_standard_error_is_that_of_the_definition(member):
    torch.manual_seed(1)
    logits = torch.randn(30, 6, 4)
    mean = MemberMean(member, errors=True)
    for part in logits.split(7):
        mean.add(part, "the input")
    T = member.temperature
    lp = oracle.log_softmax(logits.double().numpy() / (T if member.temper == "sample" else 1))
    if member.alpha == 0:
        variance = lp.var(0)
    else:
        powers = np.exp(member.alpha * lp)
        variance = powers.var(0) / powers.mean(0) ** 2 / member.alpha**2
    p = np.exp(oracle.member_log_probs(
        oracle.log_softmax(logits.double().numpy()), member.alpha, T, member.temper
    ))  # fmt: skip
    expected = np.sqrt((p * variance).sum(-1) / 29) / (T if member.temper == "mean" else 1)
    np.testing.assert_allclose(mean.standard_error().numpy(), expected, rtol=1e-2)


def test_the_error_is_the_spread_over_seeds_of_independent_masks():
    model, x = network()
    found = []
    for seed in range(60):
        predict = ad.Predictor(model, ad.AMC, 20, seed, masks="iid")
        found.append(predict(x))
    lp = torch.stack(found)
    spread = (lp.mean(0).exp() * lp.var(0)).sum(-1).sqrt()
    mean, control = MemberMean(ad.AMC, errors=True), ad.find_sites(model, x).control(model)
    rows = Rows(Plan(20, 0, "iid"), (1.0,), range(20), torch.zeros(12, dtype=torch.int64))
    with torch.no_grad(), control.prepared(1.0):
        mean.add(control.forward(rows, x.repeat(20, 1)).unflatten(0, (20, 12)), "the input")
    # 20 samples know a standard deviation to about a sixth, 60 seeds to a tenth.
    ratio = (mean.standard_error() / spread).log().mean().exp()
    assert 0.75 < ratio < 1.3


def prefix_of(model, x, member, samples):
    """What the first samples of a plan of four blocks give."""
    control, mean = ad.find_sites(model, x).control(model), MemberMean(member)
    zeros = torch.zeros(len(x), dtype=torch.int64)
    with torch.no_grad(), control.prepared(member.multiplier):
        for k in range(samples):
            rows = Rows(Plan(20, 0, blocks=4), (member.multiplier,), range(k, k + 1), zeros)
            mean.add(control.forward(rows, x).unsqueeze(0), "the input")
    return mean.result()


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize(("tolerance", "samples"), [(1e9, 5), (1e-9, 20)])
def test_all_inputs_stop_after_the_first_block_or_never(member, tolerance, samples):
    model, x = network()
    got = ad.Predictor(model, member, 20, tolerance=tolerance)(x)
    expected = prefix_of(model, x, member, samples)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("once", [True, False])
def test_an_input_gets_the_same_prediction_in_any_batch(once):
    model, x = network()
    rows = []
    model[-1].register_forward_hook(lambda module, args, out: rows.append(len(out)))
    member = ad.Member(0.5, 1.0)
    predict = ad.Predictor(model, member, 20, tolerance=0.12, compute_once=once)
    whole = predict(x)
    rows.clear()
    predict(x)
    assert 12 * 5 < sum(rows) < 12 * 20  # some stop early, some do not
    for i in range(12):
        torch.testing.assert_close(predict(x[i : i + 1]), whole[i : i + 1])
    small = ad.Predictor(model, member, 20, tolerance=0.12, compute_once=once, memory=2**20)
    torch.testing.assert_close(small(x), whole)
    stages = [prefix_of(model, x, member, k) for k in (5, 10, 15, 20)]
    nearest = torch.stack([(whole - stage).abs().amax(1) for stage in stages]).amin(0)
    assert (nearest < 1e-4).all()


class SharedMask(nn.Module):
    """All rows share a mask, so that samples run one per pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, x):
        return x @ nn.functional.dropout(self.weight, 0.5, self.training).t()


def test_samples_that_run_one_by_one_stop_as_well():
    model, x = SharedMask().eval(), torch.randn(12, 5) * torch.logspace(-2, 1, 12)[:, None]
    predict = ad.Predictor(model, ad.AMC, 20, tolerance=0.12)
    whole = predict(x)
    for i in range(12):
        torch.testing.assert_close(predict(x[i : i + 1]), whole[i : i + 1])


def test_sequences_stop_at_their_worst_position():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(7, 16), nn.Dropout(0.5), nn.Linear(16, 5)).eval()
    tokens = torch.randint(7, (6, 9))
    predict = ad.Predictor(model, ad.AMC, 40, tolerance=0.1, class_dim=-1)
    whole = predict(tokens)
    assert whole.shape == (6, 9, 5)
    torch.testing.assert_close(predict(tokens[2:4]), whole[2:4])


@pytest.mark.parametrize("tolerance", [0, -0.1, True, "0.1", float("nan")])
def test_a_tolerance_that_is_not_positive_is_refused(tolerance):
    with pytest.raises(DataError, match=r"tolerance=.* must be a positive number"):
        ad.Predictor(network()[0], ad.AMC, tolerance=tolerance)
