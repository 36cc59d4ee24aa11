"""Errors of a choice: do they cover what the choice gains on other data?

A small network is evaluated on a pool of 20,000 examples, from which data sets are drawn. On each,
`select` chooses a member; what that member gains on the whole pool is the truth. Printed for each
model and size N of the data sets:

    gain, cross-fitted   means over data sets
    truth                mean gain of the choices on the pool
    covered              share of data sets where the truth lies within 1.96 stated errors of the
                         gain and of the cross-fitted gain
    same choice          how often two independent data sets have the same best candidate; what
                         bootstrap resamples (`recurrence` of the best) and disjoint halves
                         (`agreement`, for half the size) say about it

    python benchmarks/bench_statistics_crossfit.py [--sets 100] [--seeds 0 1]
"""

import argparse
import collections

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.evaluation.scores import schema

POOL = 20_000
GRID = ad.Grid((0.0, 0.5, 1.0), (0.0, 0.33, 0.67, 1.0))
# Trained on 150 examples and overconfident, or divided by a temperature that leaves little to gain.
MODELS = {"overconfident": 1.0, "nearly calibrated": 2.4}


def evaluated(divisor: float, seed: int) -> ad.Scores:
    """Scores of the pool."""
    torch.manual_seed(seed)
    inner, outer = torch.randn(6, 12), torch.randn(12, 4) * 1.2

    def draw(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 6)
        return x, torch.distributions.Categorical(logits=(x @ inner).tanh() @ outer).sample()

    x, y = draw(150)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 4))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(250):
        for some in torch.randperm(150).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(x[some]), y[some]).backward()
            optimiser.step()
    for parameter in model[3].parameters():
        parameter.data /= divisor
    x, y = draw(POOL)
    data = list(zip(x.split(2000), y.split(2000)))
    return ad.evaluate(model.eval(), data, grid=GRID, num_samples=10, temperatures=(0.125, 8.0))


def part_of(scores: ad.Scores, some: Tensor) -> ad.Scores:
    """Scores of some examples of one target each."""
    tensors = {n: schema.select_targets(n, t, some) for n, t in scores.tensors.items()}
    tensors[schema.name_of("data", "examples")] = torch.arange(len(some))
    return ad.Scores(scores.protocol, tensors)


def simulate(scores: ad.Scores, size: int, sets: int) -> str:
    """A row of the table."""
    generator = torch.Generator().manual_seed(size)
    plain, rows, best = scores.xe(ad.DET).value, [], collections.Counter()
    for seed in range(sets):
        some = torch.randperm(POOL, generator=generator)[:size]
        choice = ad.select(part_of(scores, some), seed=seed, resamples=50)
        truth = plain - scores.xe(choice.member).value
        gain, fitted = choice.gain, choice.crossfit
        first = choice.ranking[0]
        name = first.member.at_temperature(1.0), first.tuned
        best[name] += 1
        said = sum(share for *own, share in choice.recurrence if tuple(own) == name)
        rows.append(
            (
                gain.value,
                fitted.value,
                truth,
                abs(gain.value - truth) < 1.96 * gain.error,
                abs(fitted.value - truth) < 1.96 * fitted.error,
                said,
                choice.agreement,
            )
        )
    gain, fitted, truth, covered, fit_covered, said, halves = torch.tensor(rows).mean(0).tolist()
    same = sum(n * (n - 1) for n in best.values()) / (sets * (sets - 1))
    return (
        f"{size:>6}{gain:>9.4f}{fitted:>9.4f}{truth:>9.4f}{covered:>9.2f}{fit_covered:>9.2f}"
        f"{same:>13.2f}{said:>9.2f}{halves:>9.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of data and weights")
    options = parser.parse_args()
    print(
        f"{'':<26}{'N':>6}{'gain':>9}{'crossfit':>9}{'truth':>9}{'covered: gain, crossfit':>27}"
        f"{'same choice, bootstrap, halves':>34}"
    )
    for name, divisor in MODELS.items():
        for seed in options.seeds:
            scores = evaluated(divisor, seed)
            for size in (40, 100, 200, 1000):
                row = simulate(scores, size, options.sets)
                print(f"{f'{name}, seed {seed}':<26}{row}", flush=True)


if __name__ == "__main__":
    main()
