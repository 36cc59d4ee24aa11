"""
Active learning by mutual information
=====================================

Choose which 8x8 digits to label next by mutual information, and compare with chance.

::

    python examples/active_learning.py --out runs/active-learning

Takes under a minute on a CPU. The loop itself is the function `learn`: train on what is labelled,
ask the predictor how much its mask samples disagree about the rest, label those on which they
disagree most. This needs a model that knows the classes already: beginning with 20 labels, chance
is better.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import afterdrop as ad
from afterdrop.data import ImageSet, load_images
from afterdrop.models import Classifier, ClassifierConfig

START, STEP = 100, 20  # labels before the first round, and per round


def learn(digits: ImageSet, by: str, rounds: int, steps: int, seed: int) -> list[float]:
    """Test accuracy after each round, when labels are chosen `by` mutual information or chance."""
    torch.manual_seed(seed)
    images, labels, accuracies = digits.train.images, digits.train.labels, []
    labelled = torch.randperm(len(images))[:START]
    for _ in range(rounds):
        model = Classifier(ClassifierConfig(input_size=64, classes=10, hidden_sizes=(128,)))
        fit(model, images[labelled], labels[labelled], steps)
        predict = ad.Predictor(model, ad.AMC, num_samples=20, seed=seed)
        right = predict(digits.test.images).argmax(-1) == digits.test.labels
        accuracies.append(right.double().mean().item())
        score = torch.rand(len(images))
        if by == "mutual information":
            score = predict.uncertainty(images).mutual_information
        score[labelled] = -1
        labelled = torch.cat([labelled, score.topk(STEP).indices])
    return accuracies


def fit(model: torch.nn.Module, images: Tensor, labels: Tensor, steps: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.eval()


def picture(path: Path, labels: list[int], curves: dict[str, Tensor]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, runs in curves.items():
        axes.errorbar(labels, runs.mean(0), runs.std(0) / len(runs) ** 0.5, label=name, capsize=2)
    axes.set(xlabel="labels", ylabel="test accuracy")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Active learning by mutual information.")
    parser.add_argument("--out", type=Path, default=Path("runs/active-learning"), help="folder")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="training steps per round")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    start, digits = time.time(), load_images("builtin:digits")
    curves = {
        by: torch.tensor(
            [learn(digits, by, options.rounds, options.steps, s) for s in range(options.seeds)]
        )
        for by in ("mutual information", "chance")
    }
    labels = [START + STEP * i for i in range(options.rounds)]
    gain = curves["mutual information"] - curves["chance"]
    print(f"Test accuracy in %, mean and standard error over {options.seeds} seeds:\n")
    print(f"{'labels':>6}{'mutual information':>22}{'chance':>18}{'difference':>18}")
    for i, count in enumerate(labels):
        cells = [100 * runs[:, i] for runs in (*curves.values(), gain)]
        shown = [f"{c.mean():.1f} ± {c.std() / len(c) ** 0.5:.1f}" for c in cells]
        print(f"{count:>6}{shown[0]:>22}{shown[1]:>18}{shown[2]:>18}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        picture(options.out / "active_learning.png", labels, curves)
    except ImportError:
        print("matplotlib is not installed: no picture")
    print(f"\nWrote {options.out} in {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
