"""Error of XE at equal K over many models: corrected Latin hypercubes and independent masks.

For each model and member, the mean squared error of XE over seeds, of independent masks without
correction divided by that of Latin hypercubes with correction: how many times more samples
independent masks would need, if errors fell as 1/K. The reference has far more samples; the error
of its own masks is subtracted. `benchmarks/bench_error.py` shows the parts for one model.

    python benchmarks/bench_statistics_masks.py [--seeds 40] [--samples 100]
"""

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.data import load_images

MEMBERS = (ad.Member(0.0, 1.0), ad.Member(0.5, 1.0), ad.Member(1.0, 1.0), ad.Member(1.0, 0.5))
GRID = ad.Grid((0.0, 0.5, 1.0), (0.5, 1.0))
TARGETS, REFERENCES, REFERENCE_SAMPLES = 100, 4, 2000


class Parity(nn.Module):
    """Dropped units act only by the parity of their number: hypercubes cannot balance that."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.scale = nn.Dropout(0.5), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """Two logits."""
        odd = (self.dropout(torch.ones(len(x), 12)) > 0).sum(1, keepdim=True) % 2
        return torch.cat([self.scale * (1.0 - 2 * odd), torch.zeros(len(x), 1)], 1)


class Attention(nn.Module):
    """A transformer layer over the rows of the image, with dropout in attention and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Ten logits."""
        return self.head(self.layer(self.embed(x.view(-1, 8, 8))).flatten(1))


def mlp(hidden: int, layers: int, rate: float, input_rate: float = 0.0) -> nn.Module:
    parts: list[nn.Module] = [nn.Dropout(input_rate)] if input_rate else []
    width = 64
    for _ in range(layers):
        parts += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(rate)]
        width = hidden
    return nn.Sequential(*parts, nn.Linear(width, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *[nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3)],
        *[nn.Conv2d(12, 16, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16 * 36, 10)],
    )


# Name: model, epochs, training examples (None for all), factor on the last layer after training.
Case = tuple[Callable[[], nn.Module], int, int | None, float]
MODELS: dict[str, Case] = {
    "1 layer of 64": (lambda: mlp(64, 1, 0.5), 60, None, 1.0),
    "1 layer of 64, input dropout": (lambda: mlp(64, 1, 0.5, 0.2), 60, None, 1.0),
    "2 layers of 64, input dropout": (lambda: mlp(64, 2, 0.5, 0.2), 60, None, 1.0),
    "2 layers of 256, input dropout": (lambda: mlp(256, 2, 0.5, 0.2), 30, None, 1.0),
    "5 layers of 24": (lambda: mlp(24, 5, 0.2), 100, None, 1.0),
    "1 layer of 10": (lambda: mlp(10, 1, 0.3), 100, None, 1.0),
    "2 layers of 64, rate 0.02": (lambda: mlp(64, 2, 0.02), 60, None, 1.0),
    "convolutional": (cnn, 30, None, 1.0),
    "attention": (Attention, 30, None, 1.0),
    "untrained, logits x10": (lambda: mlp(64, 2, 0.5, 0.2), 0, None, 10.0),
    "overfitted, logits x3": (lambda: mlp(64, 1, 0.3), 300, 100, 3.0),
    "parity of the mask": (Parity, 0, None, 1.0),
}


def trained(case: Case, images: Tensor, labels: Tensor) -> nn.Module:
    make, epochs, count, factor = case
    torch.manual_seed(0)
    model = make()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    images, labels = images[:count], labels[:count]
    for _ in range(epochs):
        for some in torch.randperm(len(images)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(images[some]), labels[some]).backward()
            optimiser.step()
    if factor != 1:
        model[-1].weight.data *= factor  # type: ignore[operator, union-attr]
    return model.eval()


def ratios(model: nn.Module, data: list[tuple[Tensor, Tensor]], k: int, seeds: int) -> list[float]:
    """Mean squared error of independent masks over that of corrected hypercubes, per member."""

    def xe(samples: int, seed: int, masks: str) -> list[ad.Estimate]:
        options = {"grid": GRID, "num_samples": samples, "temperatures": (0.25, 4.0)}
        scores = ad.evaluate(model, data, seed=seed, masks=masks, **options)
        return [scores.xe(member) for member in MEMBERS]

    many = [xe(REFERENCE_SAMPLES, 10**6 + i, "lhs") for i in range(REFERENCES)]
    iid = [[e.value for e in xe(k, seed, "iid")] for seed in range(seeds)]
    lhs = [[e.corrected for e in xe(k, seed, "lhs")] for seed in range(seeds)]
    found = []
    for i in range(len(MEMBERS)):
        truth = torch.tensor([one[i].corrected for one in many]).double().mean()
        own = sum(one[i].mc_error ** 2 for one in many) / REFERENCES**2
        squares = [
            (torch.tensor(v).double()[:, i] - truth).square().mean() - own for v in (iid, lhs)
        ]
        found.append((squares[0] / squares[1].clamp_min(own / 10)).item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--samples", type=int, nargs="+", default=[20, 100])
    options = parser.parse_args()
    digits = load_images("builtin:digits")
    images = digits.train.images.flatten(1)
    data = [(digits.valid.images[:TARGETS].flatten(1), digits.valid.labels[:TARGETS])]
    heads = ("alpha 0", "alpha 0.5", "alpha 1", "alpha 1, x0.5")
    for k in options.samples:
        print(f"{f'K = {k}, {options.seeds} seeds':<34}" + "".join(f"{h:>15}" for h in heads))
        every = []
        for name, case in MODELS.items():
            model = trained(case, images, digits.train.labels)
            own = data if name != "parity of the mask" else [(data[0][0], data[0][1] % 2)]
            every.append(ratios(model, own, k, options.seeds))
            print(f"{name:<34}" + "".join(f"{r:>15.1f}" for r in every[-1]), flush=True)
        middle = torch.tensor(every).median(0).values.tolist()
        print(f"{'median':<34}" + "".join(f"{r:>15.1f}" for r in middle), flush=True)


if __name__ == "__main__":
    main()
