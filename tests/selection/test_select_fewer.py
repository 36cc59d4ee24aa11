"""Choosing for a predictor with fewer samples than were evaluated."""

import dataclasses

import pytest
import torch
from select_cases import overconfident
from torch import nn

import afterdrop as ad
from afterdrop.errors import MemberError


def test_fewer_samples_of_the_predictor_count_against_sampling(scores):
    few, many = (ad.select(scores, num_samples=k, folds=0, resamples=0) for k in (2, 1000))
    for member in (ad.AMC, ad.Member(0.5, 1)):
        at = {c.member: c.xe for c in few.ranking}, {c.member: c.xe for c in many.ranking}
        assert at[0][member] > at[1][member]
        assert at[0][member] == pytest.approx(scores.xe(member).at(2))
    assert few.num_samples == 2 and "2 samples" in str(few)


def test_fewer_samples_are_never_promised_to_be_better(scores):
    for k in (2, 4, 8):
        for candidate in ad.select(scores, num_samples=k, folds=0, resamples=0).ranking:
            at_all = scores.xe(candidate.member).value
            assert candidate.xe >= at_all - 1e-12


def test_a_predictor_of_fewer_samples_gets_a_temperature_of_its_own():
    """Checked by independent masks, whose cost falls as 1/k, against evaluations with k samples."""
    model, x, y = overconfident(400)
    grid = ad.Grid((1,), (0, 1))
    options = {"grid": grid, "masks": "iid", "temperatures": (0.25, 16.0)}
    many = ad.evaluate(model, [(x, y)], num_samples=64, **options)
    few = [ad.evaluate(model, [(x, y)], num_samples=8, seed=s, **options) for s in range(1, 7)]
    own = many.fit(ad.AMC, 8).member.temperature
    wanted = [scores.fit(ad.AMC).member.temperature for scores in few]
    assert many.fit(ad.AMC).member.temperature < min(wanted) - 0.1
    assert min(wanted) * 0.9 < own < max(wanted) * 1.1
    chosen = ad.select(many, num_samples=8, folds=0, resamples=0)
    assert any(c.member == ad.AMC.at_temperature(own) for c in chosen.ranking)


def test_far_fewer_samples_than_were_evaluated_are_refused():
    model, x, y = overconfident(20)
    scores = ad.evaluate(model, [(x, y)], num_samples=22, grid=ad.Grid((1,), (0, 1)))
    with pytest.raises(MemberError, match="evaluate with num_samples=2, or select for 4 or more"):
        ad.select(scores, num_samples=2)
    assert ad.select(scores, num_samples=4).num_samples == 4


def test_fewer_evenly_spread_samples_are_said_to_cost_more(scores):
    assert not ad.select(scores, folds=0, resamples=0).optimistic
    fewer = ad.select(scores, num_samples=4, folds=0, resamples=0)
    assert fewer.optimistic
    sampled = next(c.member for c in fewer.ranking if not c.member.deterministic)
    said = str(dataclasses.replace(fewer, member=sampled))
    assert "evaluate with num_samples=4" in said
    model, x, y = overconfident(20)
    independent = ad.evaluate(model, [(x, y)], num_samples=8, masks="iid")
    assert not ad.select(independent, num_samples=4, folds=0, resamples=0).optimistic


def test_a_law_of_independent_masks_promises_too_much_of_few_evenly_spread_ones():
    """Of a small hypercube little is even: four samples cost far more than 1/K from 100 says."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 40), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Dropout(0.2), nn.Linear(40, 4)).eval()
    with torch.no_grad():
        for layer in (0, 3, 6):
            model[layer].weight.mul_(2.5)
    x, y = torch.randn(1000, 5), torch.randint(4, (1000,))

    def xe(masks, samples, seed=0):
        options = {"grid": ad.Grid((0,), (0, 1)), "masks": masks, "seed": seed}
        return ad.evaluate(model, [(x, y)], num_samples=samples, **options).xe(ad.GMC)

    shares = []
    for masks in ("lhs", "iid"):
        costs = torch.tensor([xe(masks, 4, seed).value for seed in range(1, 9)])
        promised = xe(masks, 100)
        real, error = costs.mean().item() - promised.value, costs.std().item() / 8**0.5
        assert real > 3 * error
        shares.append((promised.at(4) - promised.value) / real)
    assert shares[0] < 0.5 and shares[1] > 0.7
