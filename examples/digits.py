"""
Train once, choose afterwards
=============================

A classifier of 8x8 digits is trained with dropout on clean images, and is then used on images of
which half come from a noisy camera. Every member of the family is evaluated on such validation
images; the chosen one is compared with `model.eval()` and with the best temperature alone, on test
images. About half a minute on two cores.

::

    python examples/digits.py --out runs/digits

A temperature makes all predictions less confident; the mean over masks does so where the masks
disagree, as they do on the noisy images. With clean images alone (`--noise 0`) a temperature is
enough.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import afterdrop as ad
from afterdrop.data import batches, load_images
from afterdrop.models import Classifier, ClassifierConfig
from afterdrop.selection import bounds_table, family_table, summary_table


def train(model: torch.nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for epoch in range(epochs):
        for inputs, targets in batches(images, labels, 100, seed=epoch):
            loss = F.cross_entropy(model(inputs), targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def from_two_cameras(images: Tensor, noise: float, seed: int) -> Tensor:
    """Half of the images as they are, half with Gaussian noise; pixels lie between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    noisy = torch.rand(len(images), 1, 1, generator=generator) < 0.5
    return images + noise * noisy * torch.randn(images.shape, generator=generator)


def picture(path: Path, scores: ad.Scores, choice: ad.Choice) -> None:
    import matplotlib.pyplot as plt

    from afterdrop.report import figures

    figure, axes = plt.subplots(figsize=(5, 4.9), layout="constrained")
    figures.family_map(scores, tuned=True, chosen=choice.member, ax=axes)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier once, choose afterwards.")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="run folder to write")
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--noise", type=float, default=1.0, help="0 for clean images only")
    parser.add_argument("--num-samples", type=int, default=100, help="number of mask samples K")
    options = parser.parse_args()
    start, run = time.time(), ad.Run(options.out)
    torch.manual_seed(0)

    digits = load_images("builtin:digits")
    model = Classifier(
        ClassifierConfig(input_size=64, classes=10, hidden_sizes=(256, 256), input_dropout=0.4)
    )
    train(model, digits.train.images, digits.train.labels, options.epochs)
    valid_images = from_two_cameras(digits.valid.images, options.noise, seed=1)
    test_images = from_two_cameras(digits.test.images, options.noise, seed=2)
    valid = batches(valid_images, digits.valid.labels, 100)
    test = batches(test_images, digits.test.labels, 100)

    print(ad.find_sites(model, valid_images[:4]), end="\n\n")
    scores = ad.evaluate(model, valid, num_samples=options.num_samples)
    run.save_scores(scores)
    print(family_table(scores, tuned=False), end="\n\n")
    print(family_table(scores, tuned=True), end="\n\n")
    print(bounds_table(scores, alphas=(0.0, 1.0)), end="\n\n")

    choice = ad.select(scores)
    run.save_choice(choice)
    print(choice, end="\n\n")

    predict = choice.predictor(model)
    chosen = F.nll_loss(predict(test_images), digits.test.labels).item()
    plain = F.cross_entropy(model(test_images), digits.test.labels).item()
    final = ad.evaluate(
        model,
        test,
        grid=ad.Grid((choice.member.alpha,), (0.0, choice.member.multiplier)),
        num_samples=options.num_samples,
        split="test",
        temperatures=choice.temperatures,
    )
    run.save_scores(final)
    print("On test data, which were not used for the choice:")
    print(summary_table(final, [ad.DET, choice.deterministic, choice.member]))
    print(
        f"\nOf {len(choice.ranking)} ways to predict with the same weights, the best on validation "
        f"data is\n  {choice.member}.\n"
        f"Its predictor has a test cross entropy of {chosen:.4f}, model.eval() has {plain:.4f}:"
    )
    for name, member in (("model.eval()", ad.DET), ("temperature alone", choice.deterministic)):
        if member == choice.member:
            print(f"  the choice is {name}")
            continue
        difference = final.difference(choice.member, member)
        print(
            f"  {difference.value:+.4f} ± {difference.error:.4f} nats compared with {name}, "
            f"{verdict(difference)}"
        )
    try:
        picture(options.out / "family.png", scores, choice)
    except ImportError:
        print("matplotlib is not installed: no picture")
    print(f"Wrote {options.out} in {time.time() - start:.0f} s.")


def verdict(difference: ad.Estimate) -> str:
    if abs(difference.value) <= 2 * difference.error:
        return "not significant with this number of test images"
    return "better" if difference.value < 0 else "worse"


if __name__ == "__main__":
    main()
