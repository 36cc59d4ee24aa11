"""A small intact file of every kind that afterdrop reads."""

import contextlib
import dataclasses
import gzip
import json
import lzma
import shutil
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

import afterdrop as ad
from afterdrop import train
from afterdrop.evaluation.loop import Execution
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel, LanguageModelConfig
from afterdrop.reproduce.chain import Chain
from afterdrop.tune.study_files import write_result
from afterdrop.tune.study_runner import run_study
from afterdrop.tune.study_settings import plan_study

GRID = ad.Grid((0, 1), (0, 1))
RECIPE = """
description = "a tiny language model"
[data]
name = {text!r}
[model]
hidden_sizes = [4]
input_dropout = 0.3
[objective]
batch_size = 4
window = 6
[optimiser]
learning_rate = 0.01
[schedule]
steps_per_interval = 2
intervals = 2
stop_patience = 5
stop_targets = [0.5]
[averaging]
latest = 1
[validation]
stripes = 2
[source]
model = "ours"
"""


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def labelled_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 4, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(2)
    ]


def write_samples(folder: Path) -> None:
    """Writes text, recipe, a trained run, parts of an evaluation, a study and images."""
    text = folder / "text"
    text.mkdir()
    words = ["the", "quick", "brown", "fox", "über", "a"]
    lines = [" ".join(words[(i * k) % 6] for k in range(1, 3 + i % 5)) for i in range(1, 80)]
    for split, part in (("train", lines[:50]), ("valid", lines[50:65]), ("test", lines[65:])):
        (text / f"{split}.txt").write_text("\n".join(part) + "\n", "utf-8")
    (folder / "recipe.toml").write_text(RECIPE.format(text=str(text)), "utf-8")
    _write_run(folder)
    _write_parts(folder / "parts")
    evaluate_stream(folder / "stream", stop=True)
    _write_study(folder)
    counts = {word: 10 * at for at, word in enumerate(["<eos>", *words])}
    (folder / "classes.json").write_text(json.dumps(counts), "utf-8")
    _write_packed(folder)
    _write_stored(folder / "stored")
    _write_distilled(folder / "distilled")
    _write_chain(folder / "chain")


def _write_run(folder: Path) -> None:
    config = ad.recipes.load(folder / "recipe.toml").config
    train.run(config, folder / "run", device="cpu", progress=False)
    run = ad.Run.open(folder / "run")
    for split in ("valid", "test"):
        request = ad.Request(GRID, Plan(4), split, stream=run.stream(), limit=20)
        run.save_scores(run.evaluate(request, Execution()))
    run.save_choice(ad.select(run.scores(), resamples=4))

    train.run(config, folder / "begun", device="cpu", progress=False, watch=stop_after_first)


def stop_after_first(line: dict[str, object]) -> str | None:
    """Interrupts a training after its first interval."""
    return "enough" if line["interval"] == 1 else None


def _write_parts(folder: Path) -> None:
    """What an evaluation leaves that was interrupted after its first batch."""

    def cut():
        yield labelled_batches()[0]
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        ad.evaluate(classifier(), cut(), grid=GRID, num_samples=4, resume=folder)


def evaluate_stream(folder: Path, stop: bool = False) -> None:
    """Evaluates a text with sampled carry, or is interrupted in the middle of it."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(6, (4,), output_dropout=0.5))
    tokens = torch.arange(40) % 5 + 1
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if stop and calls == 20:
            raise KeyboardInterrupt

    model.register_forward_pre_hook(count)
    with contextlib.suppress(KeyboardInterrupt) if stop else contextlib.nullcontext():
        options = {"grid": GRID, "num_samples": 2, "window": 4, "carry": "sampled"}
        ad.evaluate_text(model, tokens, 0, lines=False, resume=folder, **options)


def _write_study(folder: Path) -> None:
    settings = plan_study(str(folder / "recipe.toml"), intervals=1, prune=False)
    place = folder / "study"
    options = {"trials": 2, "top": 1, "reruns": 1, "quiet": True, "devices": ["cpu"]}
    write_result(run_study(settings, place, **options), place)
    shutil.copy(folder / "recipe.toml", place)


def _write_packed(folder: Path) -> None:
    """The text compressed in two ways, and two images with their labels as MNIST has them."""
    content = (folder / "text" / "train.txt").read_bytes()
    (folder / "train.txt.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "train.txt.xz").write_bytes(lzma.compress(content))
    images = struct.pack(">4B3I", 0, 0, 8, 3, 4, 2, 2) + bytes(range(16))
    (folder / "images-idx3-ubyte").write_bytes(images)


def _write_stored(folder: Path) -> None:
    """Predictions of four models in three forms, their targets, and the choice of a mean."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, 12)
    samples = np.eye(3)[targets] + rng.normal(size=(4, 12, 3))
    np.save(folder / "samples.npy", samples)
    np.save(folder / "targets.npy", targets)
    save_file({"logits": torch.from_numpy(samples).float()}, folder / "samples.safetensors")
    run = ad.Run(folder / "run")
    run.save_scores(ad.evaluate_samples(samples, targets))
    run.save_choice(ad.select(run.scores(), resamples=4))


def distil_again(folder: Path, stop: bool = False) -> None:
    """Distils a choice in three epochs, or is interrupted in the last one."""
    model, data = classifier(), labelled_batches()
    scores = ad.evaluate(model, data, grid=ad.Grid((1,), (1,)), num_samples=4)
    choice = dataclasses.replace(ad.select(scores, resamples=0), member=ad.AMC)

    class Batches(list):
        opened = 0

        def __getitem__(self, index):
            self.opened += 1
            if stop and self.opened > 4:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    with contextlib.suppress(KeyboardInterrupt) if stop else contextlib.nullcontext():
        ad.distil(choice, model, Batches(data), epochs=3, resume=folder)


def _write_distilled(folder: Path) -> None:
    distil_again(folder, stop=True)


def chain_of(folder: Path) -> Chain:
    """A reproduction in a folder."""
    return Chain(folder, None, 1.0, "cpu", 4, progress=False)


def _write_chain(folder: Path) -> None:
    folder.mkdir()
    job = {"intervals": 3, "steps_per_interval": 2, "trained": True, "limits": {"valid": None}}
    chain_of(folder)._write_plan({"first": job, "second": {"intervals": 1}})
