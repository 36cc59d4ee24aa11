"""Test data: hostile names, scores of a small classifier, and a study."""

import dataclasses
import math

import torch
from torch import nn

import afterdrop as ad
from afterdrop.tune.study_result import StudyResult, rank
from afterdrop.tune.study_settings import plan_study
from afterdrop.tune.trials import Trial

EVIL = (
    "<script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "'\"><svg onload=document.title='taken'>",
    "$\\frac{1}{$ & {{ 7 * 7 }} {% raw %}",
    "very_long_" * 30,
)
# A folder's name may hold anything but a slash.
EVIL_FOLDER = "<img src=x onerror=document.title='taken'> & " + "long" * 30


SMALL = [
    "model.hidden_sizes=[12,12]",
    "model.mogrifier_rounds=2",
    "model.mogrifier_rank=3",
    "schedule.intervals=3",
    "schedule.steps_per_interval=6",
    "schedule.drop_latest=1",
    "objective.batch_size=4",
    "objective.window=10",
    "validation.stripes=2",
]


def own_scores(split="valid", seed=0, classes=5, grid=None, blocks=2, scale=1.0):
    """Scores of a small classifier that has learned something, on 120 examples.

    Its logits are multiplied by `scale`.
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, classes))
    x = torch.randn(400, 6, generator=torch.Generator().manual_seed(9))
    teacher = torch.randn(6, classes, generator=torch.Generator().manual_seed(8))
    y = (x @ teacher).argmax(-1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    with torch.no_grad():
        net[-1].weight.mul_(scale)
        net[-1].bias.mul_(scale)
    inputs = torch.randn(120, 6, generator=generator)
    targets = (inputs @ teacher + torch.randn(120, classes, generator=generator)).argmax(-1)
    grid = grid or ad.Grid((0, 0.5, 1), (0, 0.3, 0.6, 1))
    return ad.evaluate(
        net, [(inputs, targets)], grid=grid, num_samples=16, blocks=blocks, split=split
    )


def save_choice(run, scores, member, **changes):
    """Writes a choice of any member of a run, as if it had been chosen on these scores."""
    choice = ad.select(scores, folds=0, resamples=0)
    ad.Run(run).save_choice(dataclasses.replace(choice, member=member, **changes))


def evil_study(trials=24):
    """A study that was never run: a valley along the learning rate, some stopped, some failed."""
    settings = dataclasses.replace(plan_study("digits-mlp"), recipe=EVIL[0])
    space, rows = settings.space, []
    for n in range(trials):
        point = space.point(torch.rand(4, generator=torch.Generator().manual_seed(n)).tolist())
        value = 0.1 + (math.log10(point["optimiser.learning_rate"]) + 3) ** 2 * (1 if n else 900)
        curve = {interval: value + 2.0**-interval for interval in range(9 if n % 5 else 4)}
        rows.append(Trial(n, "complete" if n % 5 else "pruned", point, value, curve=curve))
    for n, reason in enumerate(EVIL, trials):
        rows.append(Trial(n, "failed", space.point([0.5] * 4), notes={"reason": reason}))
    best = min((row for row in rows if row.state == "complete"), key=lambda row: row.value)
    notes = [{"of": best.number, "seed": seed} for seed in (1001, 1002)]
    again = [
        Trial(n, "complete", best.point, best.value + 0.01 * (n + 1), note)
        for n, note in enumerate(notes)
    ]
    return StudyResult(settings, rows, again, rank(rows, again, top=3))
