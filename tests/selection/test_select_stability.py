"""What the checks of a choice say, and when they say nothing."""

import math

import pytest
import torch
from select_cases import GRID, overconfident
from torch import nn

import afterdrop as ad
from afterdrop.errors import MemberError
from afterdrop.evaluation.scores import schema
from afterdrop.selection.criteria import Criterion
from afterdrop.selection.stability import check_stability


def of_examples(scores, some):
    """Scores of some examples of one target each."""
    tensors = {n: schema.select_targets(n, t, some) for n, t in scores.tensors.items()}
    tensors["data.examples"] = torch.arange(len(some))
    return ad.Scores(scores.protocol, tensors)


@pytest.fixture(scope="module")
def pool():
    """Nearly nothing to gain: what is best on few examples is chance."""
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Dropout(0.3), nn.Linear(30, 4)), None
    with torch.no_grad():
        model[3].weight.mul_(4)
        x = torch.randn(4000, 5) * 2
        y = torch.distributions.Categorical(logits=model.eval()(x)).sample()
    return ad.evaluate(model, [(x, y)], grid=GRID, num_samples=6, temperatures=(0.125, 8.0))


@pytest.fixture(scope="module")
def choices(pool):
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randperm(4000, generator=generator)[:40] for _ in range(60)]
    return [
        ad.select(of_examples(pool, some), seed=i, resamples=40) for i, some in enumerate(draws)
    ]


def test_the_error_of_the_crossfitted_gain_covers_what_the_choice_gains_elsewhere(pool, choices):
    plain = pool.xe(ad.DET).value
    covered = 0
    for choice in choices:
        truth = plain - pool.xe(choice.member).value
        covered += abs(choice.crossfit.value - truth) < 1.96 * choice.crossfit.error
    assert covered >= 0.9 * len(choices)  # the spread between targets alone: 0.83


def test_halves_agree_as_independent_data_do_and_resamples_more_often(pool, choices):
    names = [(c.ranking[0].member.at_temperature(1.0), c.ranking[0].tuned) for c in choices]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    independent = sum(a == b for a, b in pairs) / len(pairs)
    halves = sum(c.agreement for c in choices) / len(choices)
    again = [sum(s for m, t, s in c.recurrence if (m, t) == n) for c, n in zip(choices, names)]
    assert sum(again) / len(again) > independent + 0.1
    assert halves < independent + 0.1  # of half the size: at most this


def test_the_text_says_what_each_number_is(choice):
    text = str(choice)
    assert "this ± ignores the selection" in choice.headline()
    assert "these examples, resampled" in text
    assert f"{100 * choice.agreement:.0f} % of divisions" in text
    assert "ignores the selection" in ad.Choice.headline(
        type(choice)(**{**vars(choice), "crossfit": None})
    )


def test_one_example_shows_neither_errors_nor_shares():
    model, x, y = overconfident(1)
    choice = ad.select(ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4))
    assert choice.recurrence == () and choice.agreement is None and choice.crossfit is None
    assert "nan" not in str(choice) and "%" not in str(choice).replace("% of it", "")
    assert choice.member == ad.DET or "unknown error" in choice.headline()


def test_checks_that_were_not_asked_for_are_none(scores):
    found = check_stability(
        scores, Criterion.of("xe"), scores.num_samples, 0.1, folds=0, resamples=0, seed=0
    )
    assert found.crossfit is None and found.recurrence == () and found.agreement is None


def test_one_sample_says_nothing_of_other_numbers():
    model, x, y = overconfident(20)
    scores = ad.evaluate(model, [(x, y)], grid=ad.Grid((1,), (0, 1)), num_samples=1)
    assert ad.select(scores).num_samples == 1
    with pytest.raises(MemberError, match="evaluate with num_samples=10"):
        ad.select(scores, num_samples=10)


def test_more_samples_than_evaluated_are_said_to_be_extrapolated(scores):
    more = ad.select(scores, num_samples=400, folds=0, resamples=0)
    sampled = next(c.member for c in more.ranking if not c.member.deterministic)
    text = str(type(more)(**{**vars(more), "member": sampled}))
    assert "400 samples are more than the 16" in text and "num_samples=400" in text
    assert all(math.isfinite(c.xe) and c.xe > 0 for c in more.ranking)
