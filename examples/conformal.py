"""
Prediction sets that hold what they promise
===========================================

Split-conformal prediction sets of a chosen member, with selection and conformal data kept apart.

::

    python examples/conformal.py --out runs/conformal

Takes under a minute on a CPU. A conformal quantile is valid for a predictor that does not know the
conformal examples. A choice knows the examples that it was made on, so three disjoint parts are
needed besides the training data: one to select on, one for the quantile, one to test. The last two
are divided anew many times, which gives the coverage and the size of the sets with standard errors.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import afterdrop as ad
from afterdrop.data import load_images
from afterdrop.models import Classifier, ClassifierConfig

LEVELS = (0.8, 0.85, 0.9, 0.95, 0.975)
DIVISIONS = 100


def train(model: torch.nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for some in torch.randperm(len(images)).split(50):
            loss = F.cross_entropy(model(images[some]), labels[some])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def threshold(log_probs: Tensor, labels: Tensor, level: float) -> float:
    """The largest score that a set of this level admits, where the score is 1 − p(label).

    It is the ceil((n + 1) level)-th smallest score of n conformal examples. The true label of a
    further example then lies in its set with a probability of at least the level.
    """
    scores = 1 - log_probs.exp().gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    rank = math.ceil((len(scores) + 1) * level)
    return scores.sort().values[rank - 1].item() if rank <= len(scores) else 1.0


def sets(log_probs: Tensor, highest: float) -> Tensor:
    """[N, V] which labels are in the set of each example."""
    return 1 - log_probs.exp() <= highest


def coverage_and_size(log_probs: Tensor, labels: Tensor, level: float) -> Tensor:
    """[divisions, 2] share of test examples whose set has the label, and mean size of the sets."""
    found = []
    for seed in range(DIVISIONS):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        conformal, test = order.chunk(2)
        highest = threshold(log_probs[conformal], labels[conformal], level)
        chosen = sets(log_probs[test], highest)
        covered = chosen.gather(-1, labels[test].unsqueeze(-1)).double().mean()
        found.append(torch.stack([covered, chosen.sum(-1).double().mean()]))
    return torch.stack(found)


def picture(path: Path, curves: dict[str, list[float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, sizes in curves.items():
        axes.plot(LEVELS, sizes, marker="o", label=name)
    axes.set(xlabel="coverage that is promised", ylabel="labels per set")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Conformal prediction sets of a chosen member.")
    parser.add_argument("--out", type=Path, default=Path("runs/conformal"), help="folder to write")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--num-samples", type=int, default=50, help="number of mask samples K")
    options = parser.parse_args()
    start = time.time()
    torch.manual_seed(0)
    digits = load_images("builtin:digits")
    model = Classifier(ClassifierConfig(input_size=64, classes=10, hidden_sizes=(128, 128)))
    train(model, digits.train.images[:120], digits.train.labels[:120], options.epochs)

    # Select on the validation split. The test split is for the quantile and for testing it.
    grid = ad.Grid((0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0))
    valid = [(digits.valid.images, digits.valid.labels)]
    scores = ad.evaluate(model, valid, grid=grid, num_samples=options.num_samples)
    choice = ad.select(scores)
    print(choice.headline() + "\n")

    images, labels = digits.test.images, digits.test.labels
    predictors = {
        "eval mode": ad.Predictor(model, ad.DET),
        "the choice": choice.predictor(model),
    }
    curves: dict[str, list[float]] = {}
    print(f"{'':<12}{'promised':>9}{'coverage':>18}{'labels per set':>19}")
    for name, predict in predictors.items():
        log_probs = predict(images)
        for level in LEVELS:
            found = coverage_and_size(log_probs, labels, level)
            mean, error = found.mean(0), found.std(0) / DIVISIONS**0.5
            curves.setdefault(name, []).append(mean[1].item())
            print(
                f"{name:<12}{level:>9.1%}{mean[0]:>9.2%} ± {error[0]:.2%}"
                f"{mean[1]:>11.3f} ± {error[1]:.3f}"
            )
    print(f"\n± is the standard error over {DIVISIONS} divisions of the same {len(labels)} images.")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        picture(options.out / "conformal.png", curves)
    except ImportError:
        print("matplotlib is not installed: no picture")
    print(f"Wrote {options.out} in {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
