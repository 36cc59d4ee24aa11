"""A choice, its model and its data, which the tests of a distillation share."""

import dataclasses

import pytest
import torch

import afterdrop as ad
from oracles.zoo import mlp


def overconfident(targets=120):
    """A network whose weights are too large for its labels, and data in small batches."""
    torch.manual_seed(0)
    model = mlp(5, 40, 4).eval()
    x = torch.randn(targets, 5) * 2
    with torch.no_grad():
        y = torch.distributions.Categorical(logits=model(x)).sample()
        model[3].weight.mul_(6)
    return model, list(zip(x.split(30), y.split(30)))


@pytest.fixture(scope="session")
def case():
    model, data = overconfident()
    scores = ad.evaluate(model, data, grid=ad.Grid((0, 1), (0, 1)), num_samples=8)
    choice = ad.select(scores, resamples=0)
    best = next(c.member for c in choice.ranking if not c.member.deterministic)
    return dataclasses.replace(choice, member=best), model, data
