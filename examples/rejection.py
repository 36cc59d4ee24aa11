"""
Decline what is uncertain
=========================

Let a classifier of 8x8 digits decline the inputs that it is most uncertain about.

::

    python examples/rejection.py --out runs/rejection

Takes under a minute on a CPU. Trains an MLP on few digits, ranks the test images by four measures
of uncertainty, and prints the error rate of what is left when the most uncertain ones are declined.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import afterdrop as ad
from afterdrop.data import load_images
from afterdrop.models import Classifier, ClassifierConfig

DECLINED = (0.0, 0.05, 0.1, 0.2, 0.3)


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


def error_rates(uncertainty: Tensor, wrong: Tensor) -> list[tuple[float, float]]:
    """The error rate and its standard error for each share of declined examples."""
    ranked, found = wrong[uncertainty.argsort()].double(), []
    for share in DECLINED:
        kept = ranked[: round(len(ranked) * (1 - share))]
        rate = kept.mean().item()
        found.append((rate, (rate * (1 - rate) / len(kept)) ** 0.5))
    return found


def picture(path: Path, curves: dict[str, list[tuple[float, float]]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        rates, errors = zip(*curve)
        axes.errorbar(DECLINED, rates, errors, label=name, capsize=2)
    axes.set(xlabel="share of declined examples", ylabel="error rate of the others")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decline the inputs that are most uncertain.")
    parser.add_argument("--out", type=Path, default=Path("runs/rejection"), help="folder to write")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--num-samples", type=int, default=100, help="number of mask samples K")
    options = parser.parse_args()
    start = time.time()
    torch.manual_seed(0)
    digits = load_images("builtin:digits")
    model = Classifier(ClassifierConfig(input_size=64, classes=10, hidden_sizes=(128, 128)))
    train(model, digits.train.images[:200], digits.train.labels[:200], options.epochs)

    predict = ad.Predictor(model, ad.AMC, options.num_samples)
    found = predict.uncertainty(digits.test.images)
    wrong = found.log_probs.argmax(-1) != digits.test.labels
    deterministic = ad.Predictor(model, ad.DET).uncertainty(digits.test.images)
    wrong_deterministic = deterministic.log_probs.argmax(-1) != digits.test.labels
    curves = {
        "eval mode, confidence": error_rates(-deterministic.confidence, wrong_deterministic),
        "mean, confidence": error_rates(-found.confidence, wrong),
        "mean, entropy": error_rates(found.predictive_entropy, wrong),
        "mutual information": error_rates(found.mutual_information, wrong),
    }
    print(f"Error rate in %, of {len(wrong)} test images less those declined:\n")
    print(f"{'declined by':<24}" + "".join(f"{share:>14.0%}" for share in DECLINED))
    for name, curve in curves.items():
        print(f"{name:<24}" + "".join(f"{100 * r:>8.2f} ± {100 * e:.2f}" for r, e in curve))
    assert found.errors is not None
    print(
        f"\nThe mutual information of an image is {found.mutual_information.mean():.4f} nats on "
        f"average, with a standard error from {options.num_samples} masks of "
        f"{found.errors.mutual_information.square().mean().sqrt():.4f}."
    )
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        picture(options.out / "rejection.png", curves)
    except ImportError:
        print("matplotlib is not installed: no picture")
    print(f"Wrote {options.out} in {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
