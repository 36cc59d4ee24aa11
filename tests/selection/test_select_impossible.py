"""Members that give a target no probability."""

import math

import pytest
import torch
from select_cases import GRID, overconfident

import afterdrop as ad


class Masked(torch.nn.Module):
    """Some samples call a class impossible: the ones that drop the first unit."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.dropout = inner, torch.nn.Dropout(0.5)

    def forward(self, x):
        logits = self.inner(x)
        dropped = self.dropout(torch.ones_like(x[:, :1])) == 0
        impossible = torch.arange(logits.shape[1]) == 0
        return logits.masked_fill(dropped & impossible, -math.inf)


@pytest.mark.parametrize("prefer", ["best", "cheapest"])
def test_a_member_that_calls_targets_impossible_is_not_chosen(prefer):
    model, x, y = overconfident(60)
    scores = ad.evaluate(Masked(model), [(x, y)], grid=GRID, num_samples=8)
    impossible = [m for m in scores.members if math.isinf(scores.xe(m).value)]
    assert impossible and all(m.alpha == 0 for m in impossible)
    found = ad.select(scores, prefer=prefer)
    finite = [c.xe for c in found.ranking if math.isfinite(c.xe)]
    assert [c.xe for c in found.ranking] == finite + [math.inf] * 2 * len(impossible)
    assert found.member not in impossible and math.isfinite(found.gain.value)
    assert not any(member in impossible for member, _, _ in found.recurrence)
    assert found.crossfit is not None and math.isfinite(found.crossfit.value)


def test_an_impossible_target_of_the_deterministic_model_is_said():
    model, x, y = overconfident(60)

    class Sure(Masked):
        def forward(self, x):
            logits = self.inner(x)
            kept = self.dropout(torch.ones_like(x[:, :1])) != 0
            return logits.masked_fill(kept & (torch.arange(4) == 0), -math.inf)

    y[:10] = 0
    scores = ad.evaluate(Sure(model), [(x, y)], grid=ad.Grid((0, 1), (0, 1)), num_samples=16)
    found = ad.select(scores, prefer="cheapest")
    assert found.member.alpha == 1 and "impossible" in found.headline()


def test_an_impossible_target_has_no_say_in_the_temperature_of_samples():
    model, x, y = overconfident(60)
    grid = ad.Grid((1,), (0, 1), "sample")

    class Never(Masked):
        def forward(self, x):
            found = self.inner(x)
            last = (x == self.masked).all(-1, keepdim=True) & (torch.arange(4) == y[0])
            return found.masked_fill(last, -math.inf)

    never = Never(model)
    options = {"grid": grid, "num_samples": 4, "temperatures": (1.0, 16.0), "masks": "iid"}
    member = ad.Member(1.0, 1.0, temper="sample")
    never.masked = torch.full((5,), math.nan)
    without = ad.evaluate(never, [(x, y)], **options)
    never.masked = x[0]
    scores = ad.evaluate(never, [(x, y)], **options)
    others = torch.ones(1, 60, dtype=torch.float64)
    others[0, 0] = 0
    wanted = without.fit_weighted(member, others)[0]
    found, xe, _ = scores.fit_weighted(member, torch.ones(1, 60, dtype=torch.float64))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    assert xe.item() == math.inf


class Exclusive(torch.nn.Module):
    """Every sample leaves out classes of its own: the geometric mean leaves no class."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.dropout = inner, torch.nn.Dropout(0.4)

    def forward(self, x):
        kept = self.dropout(torch.ones(len(x), 4)) > 0
        kept = kept | (~kept.any(1, keepdim=True) & (torch.arange(4) == 0))
        return self.inner(x).masked_fill(~kept, -math.inf)


@pytest.fixture(scope="module")
def without_any_class():
    model, x, y = overconfident(80)
    return ad.evaluate(Exclusive(model), [(x, y)], grid=GRID, num_samples=12)


def test_a_mean_that_leaves_no_class_has_an_infinite_cross_entropy(without_any_class):
    scores = without_any_class
    log_z = scores.field("sampled", "one")[scores.index(ad.GMC)]
    empty = log_z.isnan()
    assert bool(empty.any())
    assert scores.xe(ad.GMC).value == math.inf
    for member in (ad.GMC, ad.GMC.at_temperature(2.0)):
        values = scores.values(member)
        assert not values.whole.isnan().any() and not values.halves.isnan().any()
    assert not scores.correct(ad.GMC)[empty].any()
    assert scores.fit_weighted(ad.GMC, torch.ones(1, 80, dtype=torch.float64))[1].item() == math.inf
    bounds = scores.bounds(ad.GMC)
    assert bounds.objective == -math.inf == bounds.bound
    assert bounds.jensen_gap == 0 and bounds.normaliser_gap == math.inf


@pytest.mark.parametrize("prefer", ["best", "cheapest"])
@pytest.mark.parametrize("k", [12, 6, 100])
def test_what_is_undefined_comes_last_and_the_best_is_still_found(without_any_class, prefer, k):
    scores = without_any_class
    found = ad.select(scores, prefer=prefer, num_samples=k)
    xes = [c.xe for c in found.ranking]
    assert xes == sorted(xes) and not any(map(math.isnan, xes)) and xes[-1] == math.inf
    tempered = scores.xe(scores.fit(ad.DET).member).value
    assert tempered < scores.xe(ad.DET).value - 0.05
    if prefer == "best":
        assert xes[0] <= tempered and found.member == found.ranking[0].member
    assert found.gain.value > 0.05 and math.isfinite(found.crossfit.value)
    assert not any(m.alpha == 0 and not m.deterministic for m, _, _ in found.recurrence)
