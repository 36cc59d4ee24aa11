"""What both the tests and the ranks that they start compute: tiny models on tiny data."""

import torch
from torch import nn

import afterdrop as ad
from afterdrop import recipes
from afterdrop.evaluation import Request, StreamSettings
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.train import TrainConfig

GRID = ad.Grid((0, 0.5, 1), (0, 0.5, 1))


def text_request(**stream) -> Request:
    """Four samples of every member on windows of five tokens."""
    return Request(GRID, Plan(4), stream=StreamSettings(window=5, **stream))


def text_config(text: str, intervals: int = 4) -> TrainConfig:
    """Every dropout site, two samples, penalties, Mogrifier rounds, resets, a drop, averaging."""
    sites = ("input", "inter_layer", "state", "update", "output", "projection", "embedding")
    rates = {f"{site}_dropout": 0.2 for site in sites}
    rounds = {"mogrifier_rounds": 3, "mogrifier_rank": 2}
    return TrainConfig.from_dict(
        {
            "data": {"name": text},
            "model": {"hidden_sizes": [12, 12], "embedding_size": 8, **rates, **rounds},
            "objective": {
                "batch_size": 4,
                "window": 6,
                "samples": 2,
                "l2_penalty": 1e-4,
                "expectation_linear_penalty": 0.25,
                "activation_penalty": 2.0,
                "temporal_activation_penalty": 1.0,
                "state_reset": 0.2,
                "jitter": 5,
            },
            "optimiser": {"learning_rate": 0.01, "max_norm": 1.0},
            "schedule": {"steps_per_interval": 5, "intervals": intervals, "drop_latest": 2},
            "averaging": {"latest": 3},
            "validation": {"stripes": 3},
        }
    )


def image_config() -> TrainConfig:
    """Batches of 150 do not fill the last step of an epoch, and 5 rows are an odd validation."""
    changes = {
        "objective.batch_size": 150,
        "objective.fraternal_penalty": 0.1,
        "schedule.intervals": 2,
        "schedule.steps_per_interval": 10,
        "model.hidden_sizes": [16],
        "validation.stripes": 5,
    }
    return recipes.load("digits-mlp").config.override(changes)


def classifier() -> tuple[nn.Module, list]:
    """A model and five batches, one of them short, with a target that does not count."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    batches = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (4, 4, 3, 4, 2)]
    batches[1][1][2] = -100
    return net, batches


def language_model() -> tuple[LanguageModel, torch.Tensor]:
    """A model and a text."""
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocabulary=11, hidden_sizes=(6,), state_dropout=0.3, output_dropout=0.4
    )
    return LanguageModel(config), torch.randint(1, 11, (90,))
