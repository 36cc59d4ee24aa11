"""The mask error of a predictor's mean XE: masks shared by all inputs, and masks per input.

    python benchmarks/result_predictor_error.py [--seeds 30]

Two small classifiers are trained: on the built-in digits, and on synthetic data with many held-out
examples. For each member and K, the script prints the mask error that `evaluate` states and the
standard deviation over seeds of the XE of `Predictor` and of `Predictor(per_example=True)`.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.data import load_images

MEMBERS = (ad.GMC, ad.AMC, ad.Member(1, 0.5))
Data = tuple[Tensor, Tensor]


def trained(features: int, hidden: int, classes: int, data: Data, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Dropout(0.2),
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(hidden, classes),
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimiser.step()
    return model.eval()


def synthetic(examples: int, seed: int) -> Data:
    """Inputs of 6 normal features, and classes drawn from a fixed linear model."""
    weights = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(examples, 6, generator=generator)
    y = torch.multinomial((2 * x @ weights).softmax(-1), 1, generator=generator).squeeze(1)
    return x, y


def xe(predict: ad.Predictor, x: Tensor, y: Tensor) -> float:
    return F.nll_loss(predict(x), y).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=30)
    seeds = range(parser.parse_args().seeds)
    digits = load_images("builtin:digits")
    train, valid = ((part.images.flatten(1), part.labels) for part in (digits.train, digits.valid))
    cases = (
        ("digits", trained(64, 48, 10, train, 300), valid),
        ("synthetic", trained(6, 24, 4, synthetic(300, 1), 300), synthetic(4000, 2)),
    )
    print("| model | examples | K | member | XE | stated | shared | per example |")
    print("|---|---|---|---|---|---|---|---|")
    for name, model, (x, y) in cases:
        for k in (10, 100):
            grid = ad.Grid((0, 1), (0.5, 1))
            scores = ad.evaluate(model, [(x, y)], grid=grid, num_samples=k)
            for member in MEMBERS:
                stated = scores.xe(member)
                spread = [
                    torch.tensor(
                        [
                            xe(ad.Predictor(model, member, k, s, per_example=own), x, y)
                            for s in seeds
                        ]
                    ).std()
                    for own in (False, True)
                ]
                print(
                    f"| {name} | {len(y)} | {k} | {member} | {stated.value:.4f} "
                    f"| {stated.mc_error:.5f} | {spread[0]:.5f} | {spread[1]:.5f} |"
                )


if __name__ == "__main__":
    main()
