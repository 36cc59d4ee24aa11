"""Samples and uncertainty of an ensemble's predictor, against NumPy in float64."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop.errors import DataError, MemberError
from oracles import family as oracle

B, V = 30, 4


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, V)).eval()


MODELS = [network(seed) for seed in range(4)]
X, Y = torch.randn(B, 5) * 2, torch.arange(B) % V


def predictor(member, models=MODELS, **options):
    scores = ad.evaluate(models, [(X, Y)], grid=ad.Grid((0, 0.5, 1)), **options)
    choice = ad.select(scores, resamples=0, folds=0)
    return dataclasses.replace(choice, member=member).predictor(models)


def log_probs(models=MODELS):
    with torch.no_grad():
        return oracle.log_softmax(np.stack([m(X).double().numpy() for m in models]))


def expected(lp, member):
    """Fields of an `Uncertainty` by name."""
    mean = oracle.member_log_probs(lp, member.alpha, member.temperature)
    return {
        "log_probs": mean,
        "confidence": np.exp(mean).max(-1),
        "predictive_entropy": oracle.entropy(mean),
        "expected_entropy": oracle.entropy(lp).mean(0),
        "disagreement": disagreement(lp, member.alpha),
        "variance": np.exp(lp).var(0),
    }


def disagreement(lp, alpha):
    power = oracle.log_power_mean(lp, alpha)
    log_z = np.log(np.exp(power).sum(-1))
    if alpha == 0:
        return -log_z
    if alpha == 1:
        return oracle.entropy(power) - oracle.entropy(lp).mean(0)
    return (1 - np.exp(alpha * log_z)) / (alpha * (1 - alpha))


MEMBERS = [ad.AMC, ad.GMC, ad.Member(0.5, 1.0, 0.8)]


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
def test_uncertainty_and_its_jackknife_are_those_of_the_oracle(member):
    predict = predictor(member)
    found, lp = predict.uncertainty(X), log_probs()
    np.testing.assert_allclose(predict.samples(X), lp, atol=1e-5)
    torch.testing.assert_close(found.log_probs, predict(X))
    wanted = expected(lp, member)
    without = [expected(np.delete(lp, k, 0), member) for k in range(len(lp))]
    for name, values in wanted.items():
        np.testing.assert_allclose(getattr(found, name), values, atol=1e-5, err_msg=name)
        rest = np.stack([each[name] for each in without])
        error = np.sqrt(3 / 4 * np.square(rest - rest.mean(0)).sum(0))
        if name != "confidence":  # which follows the class that is most probable in the whole
            np.testing.assert_allclose(getattr(found.errors, name), error, atol=2e-5, err_msg=name)
    assert found.errors.confidence.shape == (B,)
    if member == ad.AMC:
        torch.testing.assert_close(found.mutual_information, found.disagreement)


def test_the_values_are_those_of_a_mask_predictor_with_the_same_samples():
    masks = ad.Predictor(MODELS[0], ad.AMC, num_samples=4)
    samples = masks.samples(X)

    class Stored(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = nn.Parameter(torch.tensor(float(number)), requires_grad=False)

        def forward(self, x):
            return samples[int(self.number)]

    models = [Stored(number) for number in range(4)]
    found, wanted = predictor(ad.AMC, models).uncertainty(X), masks.uncertainty(X)
    for field in dataclasses.fields(wanted):
        if isinstance(getattr(wanted, field.name), torch.Tensor):
            torch.testing.assert_close(getattr(found, field.name), getattr(wanted, field.name))


def test_one_model_alone_is_certain_and_two_do_not_show_the_error_of_their_disagreement():
    alone = predictor(ad.DET)
    found = alone.uncertainty(X)
    assert not found.disagreement.any() and not found.errors.log_probs.any()
    assert alone.samples(X).shape == (1, B, V)
    two = predictor(ad.AMC, MODELS[:2]).uncertainty(X)
    assert two.errors.disagreement.isnan().all() and two.errors.log_probs.isfinite().all()


def test_masks_are_grouped_by_model_and_classes_stay_in_their_dimension():
    predict = predictor(ad.AMC, MODELS[:2], num_samples=4)
    assert predict.samples(X).shape == (8, B, V)
    assert predict.uncertainty(X).errors.disagreement.isfinite().all()
    images = [nn.Conv2d(2, V, 1) for _ in range(3)]
    x, y = torch.randn(6, 2, 3, 5), torch.randint(V, (6, 3, 5))
    choice = ad.select(ad.evaluate(images, [(x, y)], class_dim=1), resamples=0, folds=0)
    predict = dataclasses.replace(choice, member=ad.AMC).predictor(images)
    found = predict.uncertainty(x)
    assert found.variance.shape == found.log_probs.shape == predict(x).shape == (6, V, 3, 5)
    assert found.disagreement.shape == (6, 3, 5)
    assert predict.samples(x).shape == (3, 6, V, 3, 5)


def test_what_an_ensemble_does_not_have_is_refused():
    x, y = torch.randn(6, 3), torch.randn(6)
    models = [nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)) for _ in range(2)]
    choice = ad.select(
        ad.evaluate(models, [(x, y)], likelihood="squared_error"), resamples=0, folds=0
    )
    for what in ("uncertainty", "samples"):
        with pytest.raises(MemberError, match=f"{what} is known for classes"):
            getattr(choice.predictor(models), what)(x)
    for name, value in (("num_samples", 4), ("per_example", True), ("tolerance", 0.1)):
        with pytest.raises(DataError, match=f"leave out {name}="):
            choice.predictor(models, **{name: value})
