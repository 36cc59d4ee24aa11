"""
Several labels per example
==========================

One logit per label, chosen by the cross entropy of all labels.

::

    python examples/multilabel.py --out runs/multilabel

The data are made by scikit-learn: bags of words about a few of eight topics, some of them rare.
Takes under a minute on a CPU. Reads top to bottom: data, an MLP with dropout, training, every
member of the family on validation data, the choice, the gain by label, and the predictor on test
data.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import make_multilabel_classification
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.selection import summary_table

LABELS = 8


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = F.binary_cross_entropy_with_logits(model(x[rows]), y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def with_error(losses: Tensor) -> str:
    """The mean of losses [N, labels], and its standard error, of which examples are the unit."""
    examples = losses.detach().double().mean(-1)
    return f"{examples.mean():.4f} ± {examples.std() / len(examples) ** 0.5:.4f}"


def picture(path: Path, counts: Tensor, gain: Tensor) -> None:
    """The gain [N, labels] by how often a label occurs in training."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    errors = gain.std(0) / len(gain) ** 0.5
    axes.errorbar(counts, gain.mean(0), errors, fmt="o", capsize=2)
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(xlabel="occurrences of the label in training", ylabel="gain on test data, nats")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Several labels per example, with dropout.")
    parser.add_argument("--out", type=Path, default=Path("runs/multilabel"), help="folder to write")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--num-samples", type=int, default=50, help="number of mask samples K")
    options = parser.parse_args()
    torch.manual_seed(0)

    made = make_multilabel_classification(
        1500, n_features=40, n_classes=LABELS, n_labels=2, length=30, random_state=0
    )
    x, y = (torch.tensor(part).float() for part in made)
    x = (x - x[:700].mean(0)) / x[:700].std(0).clamp_min(1e-3)
    valid, test = (x[700:1100], y[700:1100]), (x[1100:], y[1100:])
    model = nn.Sequential(
        nn.Dropout(0.2),
        nn.Linear(40, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, LABELS),
    )
    train(model, x[:700], y[:700], options.epochs)

    scores = ad.evaluate(model, [valid], num_samples=options.num_samples, likelihood="multilabel")
    choice = ad.select(scores)
    print(choice.headline())
    print(summary_table(scores, [ad.DET, choice.deterministic, ad.AMC, choice.member]))
    for member in (ad.DET, choice.member):
        print(f"XE per example, {member}: {scores.xe_per_example(member)}")

    counts = y[:700].sum(0)
    middle = counts.median().item()
    print("\nDifference to deterministic evaluation by how often a label occurs in training:")
    bands = [(0.0, middle), (middle, 700.0)]
    for (low, high), number, found in scores.by_frequency(choice.member, counts, bands, ad.DET):
        print(f"  more than {low:g}, up to {high:g} times: {number} targets, {found}")

    log_probs = choice.predictor(model)(test[0])
    chosen = -log_probs.gather(-1, test[1].long().unsqueeze(-1)).squeeze(-1)
    plain = F.binary_cross_entropy_with_logits(model(test[0]), test[1], reduction="none")
    print(
        f"\nTest cross entropy per label: {with_error(chosen)}; of model.eval(): "
        f"{with_error(plain)}; gain {with_error(plain - chosen)}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        picture(options.out / "gain.png", counts, (plain - chosen).detach())
    except ImportError:
        print("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
