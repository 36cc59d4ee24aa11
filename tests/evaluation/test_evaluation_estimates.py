"""What Scores say of other numbers of samples, of temperatures between nodes, and when pickled."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import afterdrop as ad
from oracles.zoo import mlp

METRICS = ("brier", "entropy", "mutual_information", "accuracy", "ece")


@pytest.fixture(scope="module")
def scores():
    torch.manual_seed(0)
    data = [(torch.randn(40, 5), torch.randint(3, (40,)))]
    return ad.evaluate(mlp(), data, grid=ad.Grid((0, 1), (0, 1)), num_samples=6)


@pytest.mark.parametrize("metric", METRICS)
def test_metrics_without_halves_do_not_claim_a_correction(scores, metric):
    found = getattr(scores, metric)(ad.AMC)
    assert math.isnan(found.corrected) and math.isnan(found.at(100))
    assert found.at(6) == found.value and "corrected" not in str(found)


@pytest.mark.parametrize("metric", [m for m in METRICS if m != "mutual_information"])
def test_deterministic_metrics_need_no_correction(scores, metric):
    found = getattr(scores, metric)(ad.DET)
    assert found.corrected == found.at(100) == found.value


def test_one_sample_has_no_correction():
    torch.manual_seed(0)
    data = [(torch.randn(40, 5), torch.randint(3, (40,)))]
    scores = ad.evaluate(mlp(), data, grid=ad.Grid((1,), (0, 1)), num_samples=1)
    for found in (scores.xe(ad.AMC), scores.perplexity(ad.AMC)):
        assert math.isnan(found.corrected) and math.isnan(found.at(10)) and found.value > 0
        assert "corrected" not in str(found)
    difference = scores.difference(ad.AMC, ad.DET)
    assert math.isnan(difference.corrected) and math.isfinite(difference.error)


@pytest.fixture(scope="module")
def confident():
    """A network that is sure and often wrong: few of its samples decide about a target."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 5)).eval()
    with torch.no_grad():
        model[3].weight.mul_(40)
    return model, [(torch.randn(150, 6), torch.randint(5, (150,)))]


@pytest.mark.parametrize("blocks", [2, 4])
def test_a_law_that_fails_is_said(confident, blocks):
    """Where the bias does not fall as 1/K the stated error of the limit covers it."""
    options = {"grid": ad.Grid((1,), (1,)), "temperatures": (0.5, 2.0), "masks": "iid"}
    truth = ad.evaluate(*confident, num_samples=4000, seed=99, **options).xe(ad.AMC).value
    found = [
        ad.evaluate(*confident, num_samples=16, seed=seed, blocks=blocks, **options).xe(ad.AMC)
        for seed in range(12)
    ]
    off = [e.corrected - truth for e in found]
    assert sum(off) / 12 > 3 * torch.tensor(off).std().item() / 12**0.5  # the law is wrong here
    assert sum(abs(e.at(4000) - truth) > 1.96 * e.mc_error for e in found) >= 2
    assert all(abs(e.at(4000) - truth) < 1.96 * e.error_at(4000) for e in found)
    assert all("does not fall as 1/K" in str(e) for e in found)


def test_enormous_logits_do_not_make_a_cross_entropy_negative(confident):
    model, data = copy.deepcopy(confident[0]), confident[1]
    with torch.no_grad():
        model[3].weight.mul_(1000)
    scores = ad.evaluate(model, data, num_samples=4, temperatures=(0.5, 2.0))
    for member in scores.members:
        found = scores.xe(member)
        assert found.corrected >= 0 and found.at(1000) >= 0
    ranking = ad.select(scores, num_samples=1000, folds=0, resamples=0).ranking
    assert all(candidate.xe >= 0 for candidate in ranking)


class Constant(nn.Module):
    """Its input is its output."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x


@pytest.mark.parametrize(("classes", "targets"), [(1000, 200), (10_000, 60), (100_000, 12)])
def test_temperatures_of_one_peak_above_many_classes(classes, targets):
    generator = torch.Generator().manual_seed(0)
    top = torch.randint(classes, (targets,), generator=generator)
    logits = 0.5 * torch.randn(targets, classes, generator=generator)
    logits[torch.arange(targets), top] = math.log(9 * classes) + 0.125
    wrong = torch.arange(targets) % 10 == 0
    labels = torch.where(wrong, (top + 1) % classes, top)
    scores = ad.evaluate(Constant(), [(logits, labels)], grid=ad.Grid((0,), (0,)))
    for temperature in (0.7, 0.85, 1.07, 1.3, 1.6):
        member = ad.DET.at_temperature(temperature)
        log_p = (logits.double() / temperature).log_softmax(-1)
        xe = -log_p.gather(1, labels[:, None]).squeeze(1)
        brier = 1 - 2 * (-xe).exp() + log_p.exp().square().sum(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        assert scores.xe(member).value == pytest.approx(xe.mean().item(), abs=1e-5)
        assert scores.brier(member).value == pytest.approx(brier.mean().item(), abs=1e-5)
        assert scores.entropy(member).value == pytest.approx(entropy.mean().item(), abs=1e-4)
        top_p = log_p.exp().amax(-1)
        torch.testing.assert_close(scores.confidence(member), top_p, rtol=0, atol=1e-4)
    fitted = scores.fit(ad.DET).member.temperature

    def slope(temperature, step=1e-3):
        ends = [(logits.double() / (temperature * math.exp(s))) for s in (step, -step)]
        losses = [nn.functional.cross_entropy(end, labels).item() for end in ends]
        return (losses[0] - losses[1]) / (2 * step)

    assert slope(fitted * 0.999) < 0 < slope(fitted * 1.001)


def test_pickled_scores_do_not_grow(scores):
    fresh = ad.Scores(scores.protocol, scores.tensors)
    before = len(pickle.dumps(fresh))
    ad.select(fresh)
    assert len(pickle.dumps(fresh)) == before
    again = pickle.loads(pickle.dumps(fresh))
    assert again.xe(ad.AMC) == fresh.xe(ad.AMC) and again.members == fresh.members


def test_pickled_scores_leave_the_memory_around_views_behind(scores):
    room = {n: torch.cat([t, t], -1)[..., : t.shape[-1]] for n, t in scores.tensors.items()}
    assert len(pickle.dumps(ad.Scores(scores.protocol, room))) < 1.1 * len(pickle.dumps(scores))
    assert copy.copy(scores).xe(ad.AMC) == copy.deepcopy(scores).xe(ad.AMC) == scores.xe(ad.AMC)
