"""A training run that the kernels support, small enough for the interpreter."""

import torch

from afterdrop.data import load_text
from afterdrop.models import LanguageModel
from afterdrop.ranks import SINGLE_PROCESS
from afterdrop.train import TrainConfig
from afterdrop.train.text_task import TextTask
from afterdrop.train.trainer import Trainer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]


def write_text(folder):
    """Writes a text in three splits and returns its folder."""
    folder.mkdir()
    lines = [" ".join(WORDS[(i * k) % 11] for k in range(1, 3 + i % 6)) for i in range(1, 40)]
    for split, part in (("train", lines[:30]), ("valid", lines[30:33]), ("test", lines[33:])):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n")
    return folder


def config(folder, model=None, **sections):
    """A configuration, updated by `model` and other sections."""
    base = {
        "data": {"name": str(folder), "level": "word"},
        "model": {"hidden_sizes": [5], "input_dropout": 0.3, "output_dropout": 0.4},
        "objective": {"batch_size": 3, "window": 3, "l2_penalty": 1e-3},
        # A large epsilon, or weights with tiny gradients move by the sign of a rounding error.
        "optimiser": {"learning_rate": 0.05, "max_norm": 1.0, "epsilon": 1e-2},
        "schedule": {"steps_per_interval": 5, "intervals": 2, "drop_latest": 3},
        "averaging": {"latest": 1},
        "validation": {"stripes": 2},
    }
    for name, section in ({"model": model or {}} | sections).items():
        base[name] = base.get(name, {}) | section
    return TrainConfig.from_dict(base)


def trainer(config, device, ranks=SINGLE_PROCESS) -> Trainer:
    """A fresh run on a device, always with the same weights."""
    torch.manual_seed(0)
    text = load_text(config.data.name, level="word")
    task = TextTask(config, text, device, ranks)
    model = task.build_model()
    assert isinstance(model, LanguageModel)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are too small to show errors
            parameter.mul_(3.0)
    return Trainer(config, task, model.to(device), ranks)
