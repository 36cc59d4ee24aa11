"""Train a classifier of 8x8 digits with dropout once, and choose the model afterwards.

    python examples/digits.py --out runs/digits

Takes about a minute on a CPU. Reads top to bottom: data, an MLP with dropout, training, every
member of the family on validation data, the choice, and its predictor on test data.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import afterdrop as ad
from afterdrop.data import batches, load_images
from afterdrop.models import Classifier, ClassifierConfig
from afterdrop.selection import bounds_table, family_table, summary_table


def train(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for epoch in range(epochs):
        for inputs, targets in batches(images, labels, 100, seed=epoch):
            loss = F.cross_entropy(model(inputs), targets)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), help="run folder to write")
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--num-samples", type=int, default=100, help="number of mask samples K")
    options = parser.parse_args()
    start, run = time.time(), ad.Run(options.out)
    torch.manual_seed(0)

    digits = load_images("builtin:digits")
    model = Classifier(
        ClassifierConfig(input_size=64, classes=10, hidden_sizes=(256, 256), input_dropout=0.2)
    )
    train(model, digits.train.images, digits.train.labels, options.epochs)
    valid = batches(digits.valid.images, digits.valid.labels, 100)
    test = batches(digits.test.images, digits.test.labels, 100)

    print(ad.find_sites(model, digits.valid.images[:4]), end="\n\n")
    scores = ad.evaluate(model, valid, num_samples=options.num_samples, progress=True)
    run.save_scores(scores)
    print(family_table(scores, tuned=False), end="\n\n")
    print(family_table(scores, tuned=True), end="\n\n")
    print(bounds_table(scores, alphas=(0.0, 1.0)), end="\n\n")

    choice = ad.select(scores)
    run.save_choice(choice)
    print(choice, end="\n\n")

    predict = choice.predictor(model)
    log_probs = predict(digits.test.images)
    chosen = F.nll_loss(log_probs, digits.test.labels).item()
    plain = F.cross_entropy(model(digits.test.images), digits.test.labels).item()
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
    print(summary_table(final, [ad.DET, choice.member]))
    difference = final.difference(choice.member, ad.DET)
    print(
        f"\nOf {len(choice.ranking)} ways to predict with the same weights, the best on validation "
        f"data is\n  {choice.member}.\n"
        f"Its predictor has a test cross entropy of {chosen:.4f}, model.eval() has {plain:.4f}:\n"
        f"a difference of {difference.value:+.4f} ± {difference.error:.4f} nats, "
        f"{_verdict(difference)}."
    )
    print(f"Wrote {options.out} in {time.time() - start:.0f} s.")


def _verdict(difference: ad.Estimate) -> str:
    if abs(difference.value) < 2 * difference.error:
        return "not significant with this number of test images"
    return "better" if difference.value < 0 else "worse"


if __name__ == "__main__":
    main()
