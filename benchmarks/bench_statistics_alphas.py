"""Mask errors of differences between alphas: are they as large as the spread over seeds?

Two alphas of one multiplier are evaluated with few samples and many seeds of masks. Printed for
each model, mask scheme and number of samples: the root mean square of the stated mask error,
divided by the standard deviation over seeds (1 is right, below 1 is too small).

    python benchmarks/bench_statistics_alphas.py [--seeds 200]
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad

MULTIPLIER = 0.4
PAIRS = ((1.0, 0.0), (0.5, 0.0), (1.0, 0.5))
MODELS = {"as trained": 1.0, "logits x2": 2.0, "logits x4": 4.0}


def trained(factor: float) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A small classifier with its logits multiplied by `factor`, and 240 examples."""
    torch.manual_seed(0)
    teacher = torch.randn(6, 3) * 1.5

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6)
        return x, torch.distributions.Categorical(logits=x @ teacher).sample()

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
    """The ratio of each of `PAIRS`."""
    grid = ad.Grid((0.0, 0.5, 1.0), (MULTIPLIER,))
    found = torch.empty(seeds, len(PAIRS), 2, dtype=torch.float64)
    for seed in range(seeds):
        scores = ad.evaluate(model, data, grid=grid, num_samples=k, seed=seed, masks=masks)
        for number, (first, second) in enumerate(PAIRS):
            members = (ad.Member(alpha, MULTIPLIER) for alpha in (first, second))
            estimate = scores.difference(*members)
            found[seed, number] = torch.tensor([estimate.value, estimate.mc_error])
    values, stated = found.unbind(-1)
    return (stated.square().mean(0).sqrt() / values.std(0)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="of masks")
    options = parser.parse_args()
    heads = "".join(f"{f'{first:g} minus {second:g}':>14}" for first, second in PAIRS)
    print(f"{'':<12}{'masks':<6}{'K':>4}{heads}")
    for name, factor in MODELS.items():
        model, data = trained(factor)
        for masks in ("lhs", "iid"):
            for k in (4, 6, 10, 20, 40):
                row = "".join(f"{r:>14.2f}" for r in ratios(model, data, masks, k, options.seeds))
                print(f"{name:<12}{masks:<6}{k:>4}{row}", flush=True)


if __name__ == "__main__":
    main()
