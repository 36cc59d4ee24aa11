from pathlib import Path

import pytest
import torch

from afterdrop.train import TrainConfig

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A tiny text with structure to learn."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [
        " ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 3 + i % 6)) for i in range(1, 200)
    ]
    for split, part in (("train", lines[:150]), ("valid", lines[150:175]), ("test", lines[175:])):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n")
    return folder


@pytest.fixture
def text_config(text_folder: Path) -> TrainConfig:
    """A run over all parts: drops, averaging, state resets, clip, prior."""
    return TrainConfig.from_dict(
        {
            "data": {"name": str(text_folder), "level": "word"},
            "model": {"hidden_sizes": [8, 8], "input_dropout": 0.3, "state_dropout": 0.2},
            "objective": {
                "batch_size": 4,
                "window": 6,
                "l2_penalty": 1e-4,
                "state_reset": 0.1,
                "jitter": 5,
            },
            "optimiser": {"learning_rate": 0.01, "max_norm": 1.0},
            "schedule": {"steps_per_interval": 5, "intervals": 6, "drop_latest": 3},
            "averaging": {"latest": 4},
            "validation": {"stripes": 3},
        }
    )
