"""A model and data on which a choice gains something."""

import torch

import afterdrop as ad
from oracles.zoo import mlp

GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))


def overconfident(targets=150, seed=0, scale=6.0):
    """A network whose weights are too large for its labels: members and temperature help."""
    torch.manual_seed(seed)
    model = mlp(5, 40, 4).eval()
    x = torch.randn(targets, 5) * 2
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=model(x)).sample()
        model[3].weight.mul_(scale)
    return model, x, y
