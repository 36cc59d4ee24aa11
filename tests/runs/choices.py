"""Choices of every kind, and their comparison where NaN equals itself."""

import dataclasses
import math

import torch
from torch import nn

import afterdrop as ad
from afterdrop.models import LanguageModel, LanguageModelConfig


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))


def scores_of(model, examples=12, **options):
    data = [(torch.randn(examples, 4), torch.randint(3, (examples,)))]
    options = {"grid": ad.Grid((0, 1), (0, 0.5, 1)), "num_samples": 4, **options}
    return ad.evaluate(model, data, **options)


def impossible():
    """Deterministic evaluation gives a target probability 0, and the samples do not."""
    scores = scores_of(net())
    scores.field("deterministic", "target")[3] = -math.inf
    return ad.select(scores)


def of_text():
    config = LanguageModelConfig(vocabulary=9, hidden_sizes=(8,), output_dropout=0.5)
    text = torch.randint(1, 9, (60,))
    options = {"grid": ad.Grid((0, 1), (0, 1)), "num_samples": 4, "lines": False}
    return ad.select(
        ad.evaluate_text(
            LanguageModel(config), text, 0, window=5, carry="sampled", lifetime="stream", **options
        )
    )


CHOICES = {
    "plain": lambda: ad.select(scores_of(net())),
    "no checks": lambda: ad.select(scores_of(net()), folds=0, resamples=0),
    "cheapest of fewer samples": lambda: ad.select(
        scores_of(net()), num_samples=2, prefer="cheapest"
    ),
    "tempered samples": lambda: ad.select(scores_of(net(), grid=ad.Grid(temper="sample"))),
    "one sample": lambda: ad.select(scores_of(net(), grid=ad.Grid((1,), (0, 1)), num_samples=1)),
    "deterministic": lambda: ad.select(scores_of(net(), grid=ad.Grid((0,), (0,)))),
    "one example": lambda: ad.select(scores_of(net(), examples=1)),
    "impossible target": impossible,
    "text": of_text,
    "every setting": lambda: ad.select(
        scores_of(
            nn.Sequential(net(), nn.Identity()),
            split="dev",
            masks="iid",
            seed=-3,
            blocks=4,
            noise=("1",),
            ignore_index=2,
            temperatures=(0.3, 3.3),
        )
    ),
}


def same(one, other):
    """Whether two values are equal in type and content, where NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return one == other
