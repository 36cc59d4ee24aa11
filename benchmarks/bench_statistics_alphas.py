"""Mask errors of differences between alphas: are they as large as the spread over seeds?

Three alphas of one multiplier are evaluated with few samples and many seeds of masks. Printed for
each model, mask scheme and number of samples: the root mean square of the stated mask error of
differences between two alphas, and of the XE of alpha 1 itself, divided by the standard deviation
over seeds (1 is right, below 1 is too small).

    python benchmarks/bench_statistics_alphas.py [--seeds 200]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad

MULTIPLIER = 0.4
PAIRS = ((1.0, 0.0), (0.5, 0.0), (1.0, 0.5))
MODELS = {  # whether the labels come from a network with a hidden layer; the factor of the logits
    "as trained": (False, 1.0),
    "logits x2": (False, 2.0),
    "logits x4": (False, 4.0),
    "harder x2": (True, 2.0),
}


def trained(harder: bool, factor: float) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A small classifier with its logits multiplied by `factor`, and 240 examples."""
    torch.manual_seed(0)
    hidden = torch.randn(6, 12)
    teacher = torch.randn(12, 3) * 1.2 if harder else torch.randn(6, 3) * 1.5

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6)
        features = (x @ hidden).tanh() if harder else x
        return x, torch.distributions.Categorical(logits=features @ teacher).sample()

    x, y = draw(400)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        for some in torch.randperm(400).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(x[some]), y[some]).backward()
            optimiser.step()
    for parameter in model[3].parameters():
        parameter.data *= factor
    return model.eval(), [draw(240)]


def ratios(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], masks: str, k: int, seeds: int
) -> list[float]:
    """The ratio of each of `PAIRS`, and of the XE of alpha 1."""
    grid = ad.Grid((0.0, 0.5, 1.0), (MULTIPLIER,))
    found = torch.empty(seeds, len(PAIRS) + 1, 2, dtype=torch.float64)
    for seed in range(seeds):
        scores = ad.evaluate(model, data, grid=grid, num_samples=k, seed=seed, masks=masks)
        member = {alpha: ad.Member(alpha, MULTIPLIER) for alpha in grid.alphas}
        estimates = [scores.difference(member[a], member[b]) for a, b in PAIRS]
        estimates.append(scores.xe(member[1.0]))
        found[seed] = torch.tensor([[e.value, e.mc_error] for e in estimates])
    values, stated = found.unbind(-1)
    return (stated.square().mean(0).sqrt() / values.std(0)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="of masks")
    options = parser.parse_args()
    names = [f"{first:g} minus {second:g}" for first, second in PAIRS] + ["XE of 1"]
    heads = "".join(f"{name:>14}" for name in names)
    print(f"{'':<12}{'masks':<6}{'K':>4}{heads}")
    for name, kind in MODELS.items():
        model, data = trained(*kind)
        for masks in ("lhs", "iid"):
            for k in (2, 4, 6, 10, 20, 40):
                row = "".join(f"{r:>14.2f}" for r in ratios(model, data, masks, k, options.seeds))
                print(f"{name:<12}{masks:<6}{k:>4}{row}", flush=True)


if __name__ == "__main__":
    main()
