import dataclasses
import math

import pytest
import torch
from select_cases import GRID, overconfident

import afterdrop as ad
from afterdrop.errors import DataError, MemberError, SplitError
from oracles.zoo import mlp


def test_the_ranking_is_sorted_and_starts_with_the_best(choice, scores):
    values = [c.xe for c in choice.ranking]
    assert values == sorted(values)
    assert choice.member == choice.ranking[0].member
    assert choice.ranking[0].difference.value == 0 == choice.ranking[0].difference.error
    for candidate in choice.ranking:
        assert candidate.xe == pytest.approx(scores.xe(candidate.member).at(16))
        assert candidate.difference.value == pytest.approx(candidate.xe - values[0])
        assert candidate.difference.value >= 0


def test_every_member_is_a_candidate_plain_and_tempered(choice, scores):
    assert len(choice.ranking) == 2 * len(scores.members)
    plain = {c.member for c in choice.ranking if not c.tuned}
    assert plain == set(scores.members) and ad.DET in plain
    tuned = [c for c in choice.ranking if c.tuned]
    assert {dataclasses.replace(c.member, temperature=1.0) for c in tuned} == set(scores.members)
    for candidate in tuned:
        fit = scores.fit(candidate.member.at_temperature(1.0))
        assert candidate.member == fit.member and candidate.at_edge == fit.at_edge


def test_deterministic_candidates_exist_where_the_grid_leaves_zero_out():
    model, x, y = overconfident()
    scores = ad.evaluate(model, [(x, y)], grid=ad.Grid((1,), (1,)), num_samples=4)
    members = [c.member for c in ad.select(scores).ranking]
    assert ad.DET in members and sum(m.deterministic for m in members) == 2


def test_the_gain_is_over_the_plain_deterministic_member(choice, scores):
    expected = scores.xe(ad.DET).value - scores.xe(choice.member).value
    assert choice.gain.value == pytest.approx(expected) and expected > 0.1
    tempered = scores.fit(ad.DET).member
    share = (scores.xe(ad.DET).value - scores.xe(tempered).value) / expected
    assert choice.temperature_share == pytest.approx(share)


def test_the_first_line_says_what_was_gained_and_what_temperature_gives(choice):
    first = str(choice).splitlines()[0]
    assert f"{choice.gain.value:.4f}" in first and "temperature alone" in first
    assert f"{100 * choice.temperature_share:.0f} %" in first
    assert str(choice.member) in str(choice)


def of_split(scores, split):
    request = dataclasses.replace(scores.request, split=split)
    return ad.Scores(dataclasses.replace(scores.protocol, request=request), scores.tensors)


def test_scores_of_test_data_are_refused(scores):
    test = of_split(scores, "test")
    with pytest.raises(SplitError, match="test"):
        ad.select(test)


@pytest.mark.parametrize("split", ["Test", "TEST"])
def test_scores_of_test_data_are_refused_however_it_is_written(scores, split):
    test = of_split(scores, split)
    with pytest.raises(SplitError, match="test"):
        ad.select(test)


def test_cheapest_is_the_cheapest_within_one_standard_error(scores):
    choice = ad.select(scores, prefer="cheapest", resamples=0, folds=0)
    chosen = next(c for c in choice.ranking if c.member == choice.member)
    assert chosen.difference.value <= chosen.difference.error
    near = [c for c in choice.ranking if c.difference.value <= c.difference.error]
    cost = {True: 0, False: 1}
    assert cost[chosen.member.deterministic] == min(cost[c.member.deterministic] for c in near)


def test_cheapest_takes_the_plain_deterministic_member_where_nothing_is_gained():
    torch.manual_seed(0)
    model, x = mlp(5, 40, 4, rate=0.01).eval(), torch.randn(300, 5)
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=model(x)).sample()
    scores = ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4)
    assert ad.select(scores, prefer="cheapest").member == ad.DET


def test_same_seed_same_selection(scores):
    a, b = (ad.select(scores, seed=3) for _ in "ab")
    assert a == b
    assert str(a) == str(b)


def test_crossfitted_gain_is_below_the_optimistic_one_on_few_data():
    gains, crossfitted = [], []
    for seed in range(6):
        model, x, y = overconfident(30, seed, 1.0)
        scores = ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4)
        choice = ad.select(scores, resamples=0)
        gains.append(choice.gain.value)
        crossfitted.append(choice.crossfit.value)
    assert sum(crossfitted) < sum(gains)


def test_pure_noise_gains_nothing_when_crossfitted():
    values, errors = [], []
    for seed in range(8):
        torch.manual_seed(seed)
        model, x = mlp(5, 40, 4).eval(), torch.randn(60, 5)
        with torch.no_grad():
            y = torch.distributions.Categorical(logits=model(x)).sample()
        scores = ad.evaluate(model, [(x, y)], grid=GRID, num_samples=8, seed=seed)
        crossfit = ad.select(scores, resamples=0, seed=seed).crossfit
        values.append(crossfit.value)
        errors.append(crossfit.error)
    mean = sum(values) / 8
    assert mean < 3 * sum(e**2 for e in errors) ** 0.5 / 8


def test_a_real_gain_survives_crossfitting(choice):
    assert choice.crossfit.value > 3 * choice.crossfit.error
    assert choice.crossfit.value <= choice.gain.value + 0.02


def test_bootstrap_shares_sum_to_one_and_favour_the_choice(choice):
    assert sum(share for _, _, share in choice.recurrence) == pytest.approx(1)
    shares = [share for _, _, share in choice.recurrence]
    assert shares == sorted(shares, reverse=True)
    best = choice.ranking[0]
    assert any(
        m == best.member.at_temperature(1.0) and tuned == best.tuned
        for m, tuned, _ in choice.recurrence
    )


def test_checks_can_be_switched_off(scores):
    choice = ad.select(scores, folds=0, resamples=0)
    assert choice.crossfit is None and choice.recurrence == ()
    assert "cross-fitted" not in str(choice)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prefer": "fastest"}, MemberError),
        ({"num_samples": 0}, DataError),
        ({"num_samples": -3}, DataError),
        ({"num_samples": 3}, DataError),  # no predictor has two halves of it
        ({"folds": -1}, MemberError),
        ({"resamples": -1}, MemberError),
        ({"folds": 1}, MemberError),
    ],
)
def test_settings_that_make_no_sense_are_refused(scores, options, error):
    with pytest.raises(error, match=next(iter(options))):
        ad.select(scores, **options)


@pytest.mark.parametrize("examples", [1, 2, 3, 5])
@pytest.mark.parametrize("prefer", ["best", "cheapest"])
def test_few_examples_do_not_break_the_selection(examples, prefer):
    model, x, y = overconfident(examples)
    scores = ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4)
    choice = ad.select(scores, prefer=prefer)
    assert choice.member in [c.member for c in choice.ranking]
    assert str(choice)


def test_examples_of_many_targets_are_resampled_together():
    torch.manual_seed(0)
    model, x, y = mlp(), torch.randn(6, 10, 5), torch.randint(3, (6, 10))
    scores = ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4)
    choice = ad.select(scores)
    assert choice.crossfit is not None
    assert choice.gain.error > 0 and math.isfinite(choice.gain.error)


def test_temperatures_at_the_edge_are_marked():
    model, x, y = overconfident(scale=60.0)
    scores = ad.evaluate(
        model, [(x, y)], grid=ad.Grid((1,), (1,)), num_samples=4, temperatures=(0.5, 1.1)
    )
    choice = ad.select(scores)
    assert any(c.at_edge for c in choice.ranking)
    assert "edge" in str(choice)


def test_tempered_samples_are_candidates_of_their_own():
    model, x, y = overconfident()
    grid = ad.Grid((0, 1), (1,), temper="sample")
    scores = ad.evaluate(model, [(x, y)], grid=grid, num_samples=8)
    choice = ad.select(scores)
    sampled = [c for c in choice.ranking if c.member.temper == "sample"]
    assert {c.tuned for c in sampled} == {True, False}


def test_differences_are_paired_and_antisymmetric(scores):
    forth, back = scores.difference(ad.AMC, ad.DET), scores.difference(ad.DET, ad.AMC)
    assert forth.value == pytest.approx(-back.value)
    assert forth.error == pytest.approx(back.error)
    assert forth.value == pytest.approx(scores.xe(ad.AMC).value - scores.xe(ad.DET).value)
    assert forth.corrected == pytest.approx(scores.xe(ad.AMC).corrected - scores.xe(ad.DET).value)
    assert scores.difference(ad.AMC, ad.AMC).error == 0
    alone = math.hypot(scores.xe(ad.AMC).error, scores.xe(ad.Member(0.5, 1)).error)
    assert scores.difference(ad.AMC, ad.Member(0.5, 1)).error < alone


def test_what_are_no_scores_is_named():
    with pytest.raises(MemberError, match="scores is list"):
        ad.select([1])


def test_without_an_error_only_the_best_is_near_enough():
    """One example has none; the deterministic model at T = 1 is far behind."""
    model, x, y = overconfident(1)
    with torch.no_grad():
        y = model(x).argmin(-1)
    scores = ad.evaluate(model, [(x, y)], num_samples=8, grid=GRID)
    found = ad.select(scores, prefer="cheapest")
    assert found.member != ad.DET
    near = scores.xe(found.member).value - found.ranking[0].xe
    assert near <= 1e-6


def test_the_cross_fitted_gain_has_an_error_from_masks(choice):
    assert choice.crossfit.mc_error > 0


def test_an_edge_says_what_to_do():
    model, x, y = overconfident()
    narrow = ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4, temperatures=(0.9, 1.1))
    assert "evaluate with temperatures=(low, high)" in str(ad.select(narrow))


def test_no_edge_no_advice(choice):
    assert not any(c.at_edge for c in choice.ranking)
    assert "temperatures=(low, high)" not in str(choice)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_equal_but_for_rounding_is_not_paid_for(seed):
    """The mean logits of a linear last layer, over whole hypercubes, are those without dropout."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 3))
    x, y = torch.randn(50, 6), torch.randint(3, (50,))
    found = ad.select(ad.evaluate(model, [(x, y)], grid=ad.Grid((0,), (0, 1)), num_samples=20))
    equal = [c for c in found.ranking if c.difference.value < 1e-6]
    assert any(not c.member.deterministic for c in equal)
    assert found.member.deterministic
