import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import afterdrop as ad
from afterdrop import recipes, train
from afterdrop.evaluation.loop import Execution
from afterdrop.masks.uniforms import Plan
from afterdrop.train import TrainConfig

sys.path.insert(0, str(Path(__file__).parent))  # for `choices`

GRID = ad.Grid((0, 1), (0, 0.5, 1))
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and"]


def finish(path, plan):
    """Evaluates a trained run on validation data and chooses a member."""
    run = ad.Run.open(path)
    scores = run.evaluate(ad.Request(GRID, plan, stream=run.stream()), Execution())
    run.save_scores(scores)
    run.save_choice(ad.select(scores))
    return run


@pytest.fixture(scope="session")
def image_run(tmp_path_factory) -> ad.Run:
    """A trained, evaluated and chosen classifier."""
    path = tmp_path_factory.mktemp("runs") / "images"
    changes = {"model.hidden_sizes": [16], "schedule.intervals": 2}
    config = recipes.load("digits-mlp").config.override(changes)
    train.run(config, path, device="cpu", progress=False)
    return finish(path, Plan(8, seed=3, scheme="iid"))


@pytest.fixture(scope="session")
def text_run(tmp_path_factory) -> ad.Run:
    """A trained, evaluated and chosen language model, whose text is read as one exact stream."""
    folder = tmp_path_factory.mktemp("runs")
    lines = [" ".join(WORDS[(i * k) % 10] for k in range(1, 3 + i % 6)) for i in range(1, 200)]
    for split, part in (("train", lines[:150]), ("valid", lines[150:175]), ("test", lines[175:])):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n")
    config = TrainConfig.from_dict(
        {
            "data": {"name": str(folder)},
            "model": {"hidden_sizes": [12], "input_dropout": 0.3, "state_dropout": 0.3},
            "objective": {"batch_size": 4, "window": 6},
            "optimiser": {"learning_rate": 0.01},
            "schedule": {"steps_per_interval": 10, "intervals": 2},
            "validation": {"stripes": 2},
        }
    )
    train.run(config, folder / "text", device="cpu", progress=False)
    return finish(folder / "text", Plan(4, seed=5))


@pytest.fixture
def own_run(tmp_path) -> ad.Run:
    """Scores and a choice of a model that was not trained by afterdrop."""
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    data = [(torch.randn(12, 4), torch.randint(3, (12,)))]
    scores = ad.evaluate(net, data, grid=GRID, num_samples=4)
    run = ad.Run(tmp_path / "own")
    run.save_scores(scores)
    run.save_choice(ad.select(scores))
    return run
