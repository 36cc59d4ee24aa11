"""Small models and data for `bench_adaptive.py`, trained once and kept in a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad
from afterdrop import recipes, train
from afterdrop.data import batches, load_images, load_text
from afterdrop.errors import DataError
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import requested_samples
from afterdrop.models import Classifier, ClassifierConfig, LanguageModel, LanguageModelConfig

WINDOW = 32


@dataclasses.dataclass(frozen=True)
class Task:
    """A trained model and how its validation data are evaluated.

    Attributes:
        name: For the table.
        evaluate: Takes the arguments `grid`, `num_samples` and `seed`, and gives Scores.
    """

    name: str
    evaluate: Callable[..., ad.Scores]


class Transformer(nn.Module):
    """A causal transformer over words."""

    def __init__(self, vocabulary: int, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(WINDOW, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, time, V] of each next word."""
        length = tokens.shape[1]
        causal = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
        return self.head(self.encoder(self.embed(tokens) + self.place[:length], mask=causal))


def fit(model: nn.Module, x: Tensor, y: Tensor, epochs: int, size: int, rate: float) -> None:
    """Trains a model of logits [B, V] or [B, time, V]."""
    optimiser = torch.optim.Adam(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(epochs):
        for some in torch.randperm(len(x), generator=generator).split(size):
            optimiser.zero_grad()
            F.cross_entropy(model(x[some]).flatten(0, -2), y[some].flatten()).backward()
            optimiser.step()
    model.eval()


def kept(model: nn.Module, path: Path, train: Callable[[], None]) -> None:
    """Trains a model, or loads the weights of an earlier training."""
    if path.exists():
        model.load_state_dict(torch.load(path))
    else:
        train()
        torch.save(model.state_dict(), path)
    model.eval()


def images(name: str, model: nn.Module, data: Any, count: int, folder: Path, epochs: int) -> Task:
    """A classifier of images, trained on at most 2,000 of them."""
    x, y = data.train.images[:2000], data.train.labels[:2000]
    kept(model, folder / f"{name}.pt", lambda: fit(model, x, y, epochs, 100, 1e-3))
    valid = list(batches(data.valid.images[:count], data.valid.labels[:count], 50))
    return Task(name, lambda **options: ad.evaluate(model, valid, **options))


def digits(folder: Path) -> Task:
    """An MLP on 8x8 digits."""
    model = Classifier(ClassifierConfig(64, 10, (128, 128), input_dropout=0.2))
    return images("digits", model, load_images("builtin:digits"), 400, folder, 60)


def mnist(folder: Path) -> Task:
    """An MLP on images of 28x28."""
    model = Classifier(ClassifierConfig(784, 10, (128, 128), input_dropout=0.2))
    return images("mnist", model, load_images("mnist"), 500, folder, 30)


def cnn(folder: Path) -> Task:
    """Convolutions with dropout of channels, then of units."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.3),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(64, 10),
    )
    return images("cnn", model, load_images("builtin:digits"), 400, folder, 40)


def windows(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and their next tokens [windows, WINDOW]."""
    count = (len(tokens) - 1) // WINDOW
    x, y = (tokens[at : at + count * WINDOW].view(count, WINDOW) for at in (0, 1))
    return x.long(), y.long()


def transformer(folder: Path) -> Task:
    """Next words of builtin:pydoc in windows."""
    text = load_text("builtin:pydoc", min_count=60)
    model = Transformer(len(text.vocabulary))

    x, y = windows(text.train[:20_000])
    kept(model, folder / "transformer.pt", lambda: fit(model, x, y, 60, 32, 1e-3))
    x, y = (part[:24] for part in windows(text.valid))
    valid = list(zip(x.split(3), y.split(3)))
    return Task("transformer", lambda **options: ad.evaluate(model, valid, **options))


def words(folder: Path) -> Task:
    """An LSTM language model of builtin:pydoc."""
    text = load_text("builtin:pydoc", min_count=60)
    config = LanguageModelConfig(
        len(text.vocabulary), (64,), input_dropout=0.3, output_dropout=0.5, state_dropout=0.2
    )
    model = LanguageModel(config)
    kept(model, folder / "words.pt", lambda: fit_text(model, text.train[:20_000]))
    valid, eos = text.valid[:800], text.vocabulary.eos_id
    return Task("words", lambda **options: ad.evaluate_text(model, valid, eos, **options))


def fit_text(model: LanguageModel, tokens: Tensor) -> None:
    """Trains on windows that start from a zero state."""
    x, y = windows(tokens)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(30):
        for some in torch.randperm(len(x), generator=generator).split(32):
            optimiser.zero_grad()
            logits = model(x[some], model.initial_state(len(some)))[0]
            F.cross_entropy(logits.flatten(0, -2), y[some].flatten()).backward()
            optimiser.step()
    model.eval()


def ptb(folder: Path) -> Task:
    """The paper's language model on PTB; on a GPU, where it takes minutes instead of days."""
    if not torch.cuda.is_available():
        raise DataError("PTB needs a GPU")
    return trained_run("ptb", "ptb-24m", folder, "cuda")


def trained_run(name: str, recipe: str, folder: Path, device: str) -> Task:
    """A recipe, trained once, on all of its validation data."""
    run = ad.Run(folder / recipe)
    if not run.trained or not (folder / f"{recipe}.done").exists():
        train.run(recipes.load(recipe).config, folder / recipe, device=device, progress=False)
        (folder / f"{recipe}.done").touch()

    def evaluate(num_samples: Any, seed: int, grid: ad.Grid | None = None) -> ad.Scores:
        plan, adaptive = requested_samples(num_samples, seed, "lhs", 2)
        request = ad.Request(grid or ad.Grid(), plan, stream=run.stream(), adaptive=adaptive)
        return run.evaluate(request, Execution(), which="best", device=device)

    return Task(name, evaluate)


TASKS: dict[str, Callable[[Path], Task]] = {
    "digits": digits,
    "mnist": mnist,
    "words": words,
    "cnn": cnn,
    "transformer": transformer,
    "ptb": ptb,
}
