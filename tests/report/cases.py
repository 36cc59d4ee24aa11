"""What reports are made of in these tests: hostile names, and scores of a small classifier."""

import torch
from torch import nn

import afterdrop as ad

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
    "schedule.turns=3",
    "schedule.steps_per_turn=6",
    "schedule.drop_latest=1",
    "objective.batch_size=4",
    "objective.window=10",
    "validation.rows=2",
]


def own_scores(split="valid", seed=0, classes=5, grid=None, blocks=2):
    """Scores of a small classifier that has learned something, on 120 examples."""
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
    inputs = torch.randn(120, 6, generator=generator)
    targets = (inputs @ teacher + torch.randn(120, classes, generator=generator)).argmax(-1)
    grid = grid or ad.Grid((0, 0.5, 1), (0, 0.3, 0.6, 1))
    return ad.evaluate(
        net, [(inputs, targets)], grid=grid, num_samples=16, blocks=blocks, split=split
    )
