"""Runs in each of two ranks that share one GPU, over gloo; every computation must use the kernels.

torchrun --nproc-per-node 2 shared_gpu.py FOLDER DEVICE
"""

import sys
from pathlib import Path

import torch.distributed as dist

import afterdrop as ad
from afterdrop import train
from afterdrop.data import load_text
from afterdrop.evaluation.engines.generic import GenericEngine
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import Request, StreamSettings
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.ranks import current
from afterdrop.train import TrainConfig
from afterdrop.train.trainer import Trainer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]


def write_text(folder: Path) -> None:
    """Writes a text in three splits."""
    folder.mkdir()
    lines = [" ".join(WORDS[(i * k) % 11] for k in range(1, 3 + i % 6)) for i in range(1, 200)]
    for split, part in (("train", lines[:150]), ("valid", lines[150:175]), ("test", lines[175:])):
        (folder / f"{split}.txt").write_text("\n".join(part) + "\n")


def config(text: Path) -> TrainConfig:
    """Embedding dropout, two samples, state resets, clip, prior and averaging.

    A large epsilon, or weights with tiny gradients move by the sign of a rounding error.
    """
    rates = {f"{site}_dropout": 0.2 for site in ("input", "state", "output", "embedding")}
    objective = {"batch_size": 8, "window": 6, "samples": 2, "l2_penalty": 1e-4}
    return TrainConfig.from_dict(
        {
            "data": {"name": str(text), "level": "word"},
            "model": {"hidden_sizes": [12, 12], **rates},
            "objective": objective | {"state_reset": 0.2, "jitter": 5},
            "optimiser": {"learning_rate": 0.05, "max_norm": 1.0, "epsilon": 1e-2},
            "schedule": {"steps_per_interval": 5, "intervals": 2},
            "averaging": {"latest": 1},
            "validation": {"stripes": 3},
        }
    )


def compute(folder: Path, name: str, device: str, *, split: bool) -> None:
    """Trains a run, evaluates it, and keeps the scores of each rank."""

    def without_kernels(*args: object) -> None:
        raise AssertionError("a step or a batch ran without kernels")

    Trainer._plain_step = without_kernels
    GenericEngine.run = without_kernels
    ranks = "split" if split else None
    train.run(config(folder / "text"), folder / name, device=device, progress=False, ranks=ranks)
    group = current(ranks)
    model, run_config, _ = train.load_model(folder / "one", device=device)
    text = load_text(run_config.data.name, level="word")
    request = Request(
        ad.Grid((0, 1), (0, 0.5, 1)), Plan(4), stream=StreamSettings(window=6, stripes=2)
    )
    execution = Execution(ranks=group, windows=2)
    scores = run_text(model, text.valid, text.vocabulary.eos_id, request, execution)
    scores.save(folder / f"{name}-{group.rank}.safetensors")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    compute(Path(sys.argv[-2]), "two", sys.argv[-1], split=True)
    dist.barrier()
    dist.destroy_process_group()
