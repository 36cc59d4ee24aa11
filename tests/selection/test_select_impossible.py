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
