"""Which share of a choice's gain one deterministic pass keeps after distillation.

    afterdrop train pydoc-small --out RUN
    python benchmarks/result_distil.py digits
    python benchmarks/result_distil.py words --run RUN

digits   an MLP (64-256-256-10) on 400 images of 8x8 digits, 30 % of whose labels are random, so
         that it is overconfident; the copy learns on the 1000 training images without labels.
words    the language model of RUN on windows of 35 words, each from a zero state; the copy learns
         on the training text.

Prints the choice on validation data and, for several numbers of epochs, the share of its gain over
deterministic evaluation that the copy keeps on validation and on test data, beside what temperature
alone keeps.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.data import TextSet, batches, load_images
from afterdrop.models import Classifier, ClassifierConfig

Data = list[tuple[Tensor, Tensor]]
WINDOW = 35


def digits() -> tuple[nn.Module, Data, Data, Data]:
    torch.manual_seed(0)
    found = load_images("builtin:digits")
    model = Classifier(
        ClassifierConfig(input_size=64, classes=10, hidden_sizes=(256, 256), input_dropout=0.2)
    )
    images, labels = found.train.images[:400], found.train.labels[:400]
    labels = torch.where(torch.rand(400) < 0.3, torch.randint(10, (400,)), labels)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for epoch in range(150):
        for x, y in batches(images, labels, 50, seed=epoch):
            loss = F.cross_entropy(model(x), y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    parts = (list(batches(p.images, p.labels, 50)) for p in (found.train, found.valid, found.test))
    return model.eval(), next(parts), next(parts), next(parts)


def words(
    path: Path, learned: int | None, evaluated: int | None
) -> tuple[nn.Module, Data, Data, Data]:
    run = ad.Run.open(path)
    text = run.data()
    assert isinstance(text, TextSet)

    def windows(split: str, most: int | None = evaluated) -> Data:
        tokens = torch.cat([torch.tensor([text.vocabulary.eos_id]), text.split(split)])
        count = min((len(tokens) - 1) // WINDOW, most or len(tokens))
        x, y = tokens[: count * WINDOW], tokens[1 : count * WINDOW + 1]
        return list(zip(x.view(-1, WINDOW).split(32), y.view(-1, WINDOW).split(32)))

    return run.model(), windows("train", learned), windows("valid"), windows("test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("digits", "words"))
    parser.add_argument("--run", type=Path, default=Path("runs/words"))
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--learned", type=int, help="words: most windows that the copy learns on")
    parser.add_argument("--evaluated", type=int, help="words: most windows of valid and of test")
    options = parser.parse_args()
    model, train, valid, test = (
        digits()
        if options.task == "digits"
        else words(options.run, options.learned, options.evaluated)
    )
    start = time.perf_counter()
    grid = ad.Grid((0, 0.5, 1), (0, 0.5, 0.8, 1))
    scores = ad.evaluate(model, valid, grid=grid, num_samples=options.num_samples)
    choice = ad.select(scores, resamples=0)
    print(f"{options.task}: {scores}, in {time.perf_counter() - start:.0f} s")
    print(f"{choice.headline()}\nChosen: {choice.member}", flush=True)
    for epochs in options.epochs:
        start = time.perf_counter()
        found = ad.distil(choice, model, train, valid=valid, epochs=epochs, lr=options.lr)
        print(f"\n{epochs} epochs of {len(train)} batches, {time.perf_counter() - start:.0f} s")
        print(found)
        print(found.compare(model, test), flush=True)


if __name__ == "__main__":
    main()
