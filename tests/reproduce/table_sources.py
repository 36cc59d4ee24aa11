"""Runs in memory, as input of the tables."""

from pathlib import Path

import torch
from torch import nn

import afterdrop as ad
from afterdrop import recipes
from afterdrop.reproduce.tables.table_input import TableInput

CLASSES = 10
SPLITS = ("train", "valid", "test")


def evaluate(split, *, seed=0, grid=None, targets=48, weights=0):
    """Scores of a small net with dropout on random data; `weights` is the seed of its weights."""
    torch.manual_seed(weights)
    net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, CLASSES))
    with torch.no_grad():
        net[3].weight.mul_(4)
    generator = torch.Generator().manual_seed(100 * seed + SPLITS.index(split))
    batch = (
        torch.randn(targets, 6, generator=generator),
        torch.randint(CLASSES, (targets,), generator=generator),
    )
    grid = grid or ad.Grid((0, 0.5, 1), (0, 0.5, 0.8, 0.9, 1), temper="sample")
    return ad.evaluate(net, [batch], grid=grid, num_samples=8, split=split)


def make_source(recipe, name="run", *, splits=SPLITS, changes=None, weights=0, **facts):
    """A run as if it had been trained by a recipe."""
    return TableInput(
        Path("runs") / name,
        recipes.load(recipe).config.override(changes or {}),
        {"unit": "word", "parameters": 24_000_000, **facts},
        {split: evaluate(split, weights=weights) for split in splits},
    )
