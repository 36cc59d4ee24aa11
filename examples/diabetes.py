"""
Regression
==========

Regression with dropout: a Gaussian head, and a squared error whose noise is fitted afterwards.

::

    python examples/diabetes.py --out runs/diabetes

The data are the 442 patients that scikit-learn ships: ten measurements, and the progression of
diabetes a year later (25 to 346). Takes under a minute on a CPU. Reads top to bottom: data, a
network with one or two outputs, training, every member of the family on validation data, the
choice, and its predictive distribution on test data.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.selection import summary_table

GRID = ad.Grid((0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0))


class Regressor(nn.Module):
    """Returns a mean and, with a Gaussian head, a variance."""

    def __init__(self, inputs: int, gaussian: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU()
        )
        self.drop, self.out, self.gaussian = nn.Dropout(0.3), nn.Linear(64, 1 + gaussian), gaussian

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """A mean, or a mean and a variance, for each row of measurements."""
        out = self.out(self.drop(self.body(x)))
        if not self.gaussian:
            return out.squeeze(-1)
        mean, raw = out.unbind(-1)
        return mean, F.softplus(raw) + 1e-3


def train(model: Regressor, x: Tensor, y: Tensor, epochs: int) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            out = model(x[rows])
            if isinstance(out, tuple):
                loss = F.gaussian_nll_loss(out[0], y[rows], out[1])
            else:
                loss = F.mse_loss(out, y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    model.eval()


def with_error(values: Tensor, digits: int = 4) -> str:
    """The mean over patients, and its standard error."""
    error = values.double().std() / len(values) ** 0.5
    return f"{values.double().mean():.{digits}f} ± {error:.{digits}f}"


def picture(path: Path, predicted: Any, targets: Tensor) -> None:
    import matplotlib.pyplot as plt

    order, places = predicted.mean.argsort(), range(len(targets))
    low, high = (predicted.quantile(p)[order] for p in (0.05, 0.95))
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.fill_between(places, low, high, alpha=0.3, label="interval of 90 %")
    axes.plot(places, predicted.mean[order], label="mean")
    axes.plot(places, targets[order], ".", color="black", label="target")
    axes.set(xlabel="test patient, by predicted mean", ylabel="progression, standardised")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Regression with dropout.")
    parser.add_argument("--out", type=Path, default=Path("runs/diabetes"), help="folder to write")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--num-samples", type=int, default=50, help="number of mask samples K")
    options = parser.parse_args()
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)

    data = load_diabetes(scaled=False)
    order = torch.randperm(442)
    x, y = torch.tensor(data.data).float()[order], torch.tensor(data.target).float()[order]
    x, y = (x - x[:222].mean(0)) / x[:222].std(0), (y - y[:222].mean()) / y[:222].std()
    valid, test = (x[222:332], y[222:332]), (x[332:], y[332:])

    for likelihood in ("gaussian", "squared_error"):
        model = Regressor(10, gaussian=likelihood == "gaussian")
        train(model, x[:222], y[:222], options.epochs)
        scores = ad.evaluate(
            model,
            [valid],
            grid=GRID,
            num_samples=options.num_samples,
            likelihood=likelihood,
        )
        choice = ad.select(scores)
        print(f"{likelihood}: {choice.headline()}")
        print(summary_table(scores, [ad.DET, ad.AMC, choice.member]))
        if likelihood == "gaussian":
            averaged = scores.quantile_average(0.5)
            best = averaged.fit(ad.DET).member
            print(f"Quantile averaging at x0.5: XE {averaged.xe(best)}, CRPS {averaged.crps(best)}")
        else:
            noise = (scores.noise_variance * choice.member.temperature) ** 0.5
            print(f"Noise of the chosen member: {noise:.3f} standard deviations of the targets")

        predict = choice.predictor(model)
        predicted: Any = predict(test[0])  # a distribution, since the targets are numbers
        low, high = predicted.quantile(0.05), predicted.quantile(0.95)
        inside = 100 * ((test[1] >= low) & (test[1] <= high)).double()
        plain: Any = ad.Predictor(
            model,
            ad.DET,
            likelihood=likelihood,
            noise_variance=scores.noise_variance if likelihood == "squared_error" else None,
        )(test[0])
        nll = -predicted.log_prob(test[1])
        gain = -plain.log_prob(test[1]) - nll
        squares = (predicted.mean - test[1]).square()
        rmse = squares.mean().sqrt()
        error = squares.std() / len(squares) ** 0.5 / (2 * rmse)
        print(
            f"On test data: NLL {with_error(nll)}, RMSE {rmse:.4f} ± {error:.4f}, "
            f"{with_error(inside, 0)} % of the targets inside intervals of 90 %.\n"
            f"Gain over deterministic evaluation: {with_error(gain)} nats.\n"
        )
        try:
            picture(options.out / f"{likelihood}.png", predicted, test[1])
        except ImportError:
            print("matplotlib is not installed: no picture")


if __name__ == "__main__":
    main()
