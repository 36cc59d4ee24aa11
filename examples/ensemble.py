"""
Averaging the networks of an ensemble
=====================================

Five small networks are trained on 8x8 digits, from different seeds and on different images. Every
power mean of them is evaluated at every temperature, on validation data and on noisy images; the
choice says what it gains, and by how many members. Then its predictor on test data, how uncertain
that is, and the same with dropout on. A picture shows the cross entropy of both sets of images
against the temperature. About 30 seconds on two cores.

::

    python examples/ensemble.py --out runs/ensemble
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import afterdrop as ad
from afterdrop.data import batches, load_images
from afterdrop.models import Classifier, ClassifierConfig
from afterdrop.selection import family_table


def train(seed: int, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = Classifier(
        ClassifierConfig(input_size=64, classes=10, hidden_sizes=(128, 128), hidden_dropout=0.1)
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for epoch in range(epochs):
        for inputs, targets in batches(images, labels, 100, seed=1000 * seed + epoch):
            loss = F.cross_entropy(model(inputs), targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


def noisy(images: torch.Tensor) -> torch.Tensor:
    """Images with noise, as other data than those that choose."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return images + 0.25 * noise


def picture(path: Path, data: dict[str, ad.Scores], choice: ad.Choice) -> None:
    """Cross entropy against the temperature, on the data that choose and on others."""
    import matplotlib.pyplot as plt

    evaluated = data["valid"].protocol
    middle = (evaluated.low * evaluated.high) ** 0.5  # of the range of temperatures
    temperatures = [middle * 0.4 * 1.1**step for step in range(20)]
    members = {"best member alone": ad.DET, "geometric mean": ad.GMC, "arithmetic mean": ad.AMC}
    figure, row = plt.subplots(1, len(data), figsize=(9, 3.6), layout="constrained")
    for axes, (name, scores) in zip(row, data.items()):
        for label, member in members.items():
            losses = [scores.xe(member.at_temperature(t)).value for t in temperatures]
            axes.plot(temperatures, losses, label=label)
        chosen = choice.member.temperature, scores.xe(choice.member).value
        axes.plot(*chosen, "o", color="black", label="chosen on valid")
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set(title=name, xlabel="temperature T", ylabel="cross entropy (nats)")
    row[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Average the networks of an ensemble.")
    parser.add_argument("--out", type=Path, default=Path("runs/ensemble"), help="folder to write")
    parser.add_argument("--members", type=int, default=5, help="number of networks")
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()
    start = time.time()
    digits = load_images("builtin:digits")
    images, labels = digits.train.images, digits.train.labels
    models = []
    for seed in range(options.members):  # each on a random third of the images, so that they differ
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        own = order[: len(images) // 3]
        models.append(train(seed, images[own], labels[own], options.epochs))
    valid = batches(digits.valid.images, digits.valid.labels, 100)

    scores = ad.evaluate(models, valid)
    print(family_table(scores, tuned=False), end="\n\n")
    print(family_table(scores, tuned=True), end="\n\n")

    best = scores.protocol.ensemble.best if scores.protocol.ensemble else 0
    disturbed = batches(noisy(digits.valid.images), digits.valid.labels, 100)
    limits = scores.protocol.low, scores.protocol.high
    other = ad.evaluate(models, disturbed, split="noisy", single=best, temperatures=limits)
    choice = ad.select(scores, also={"noisy": other})
    print(choice, end="\n\n")
    print("By the Brier score:", ad.select(scores, by="brier").headline(), end="\n\n")

    predict = choice.predictor(models)
    labels = digits.test.labels
    found = F.nll_loss(predict(digits.test.images), labels).item()
    alone = [F.cross_entropy(model(digits.test.images), labels).item() for model in models]
    print(
        f"Cross entropy on test data: {found:.4f} with the chosen mean; alone, the members have "
        f"{min(alone):.4f} to {max(alone):.4f}, and the best on validation data {alone[best]:.4f}."
    )
    assert not isinstance(predict, ad.StreamPredictor)  # which is for texts
    both = digits.test.images, noisy(digits.test.images)
    doubt = [predict.uncertainty(images).disagreement.mean().item() for images in both]
    print(
        f"The members disagree by {doubt[0]:.4f} nats per test image, and by {doubt[1]:.4f} with "
        "noise."
    )
    grid = ad.Grid(alphas=(0.0, 0.5, 1.0), multipliers=(0.0, 0.5, 1.0))
    masked = ad.evaluate(models, valid, grid=grid, num_samples=10, temperatures=limits)
    with_masks = min(masked.xe(masked.fit(member).member).value for member in masked.members[1:])
    without = choice.ranking[0].xe
    print(
        f"The best mean on validation data has a cross entropy of {without:.4f} with dropout off, "
        f"and of {with_masks:.4f} with 10 masks per member."
    )
    run = ad.Run(options.out)
    run.save_scores(scores)
    run.save_scores(other)
    run.save_choice(choice)
    try:
        picture(options.out / "ensemble.png", {"valid": scores, "noisy": other}, choice)
    except ImportError:
        print("matplotlib is not installed: no picture")
    print(f"Wrote {options.out} in {time.time() - start:.0f} s.")


if __name__ == "__main__":
    main()
