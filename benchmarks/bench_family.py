"""Cost of evaluating the whole family (51 members), compared with plain passes.

The baseline runs the same model in train mode (normalisation in eval mode), K passes at each of ten
rates, with torch's own dropout, and discards the outputs. afterdrop evaluates K samples at ten
multipliers with five alphas, every temperature, both halves, bounds, moments and results per
target. The required ratio is at most 1.3; below 1, the family costs less than the passes alone.

    python benchmarks/bench_family.py [--threads 2] [--repeats 3]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import afterdrop as ad

MULTIPLIERS = ad.Grid().stochastic


def mlp() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.5)]
    layers += [nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(256, 784)


def cnn() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Dropout2d(0.2), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(800, 128), nn.ReLU()]
    layers += [nn.Dropout(0.5), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(128, 1, 28, 28)


@torch.no_grad()
def plain_passes(model: nn.Module, x: Tensor, num_samples: int) -> None:
    """K passes at ten rates, as a user would write them."""
    model.train()
    drops = [m for m in model.modules() if isinstance(m, nn.Dropout | nn.Dropout2d)]
    rates = [m.p for m in drops]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    for multiplier in MULTIPLIERS:
        for module, rate in zip(drops, rates):
            module.p = multiplier * rate
        for _ in range(num_samples):
            model(x).log_softmax(-1)
    for module, rate in zip(drops, rates):
        module.p = rate
    model.eval()


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-samples", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {options.threads} threads, K = {options.num_samples}")
    print(f"{'model':<8}{'plain passes':>14}{'whole family':>14}{'ratio':>8}{'spread':>16}")
    for name, make in (("MLP", mlp), ("CNN", cnn)):
        model, x = make()
        model.eval()
        batches = [(x, torch.randint(10, (len(x),)))]
        plain = timed(lambda: plain_passes(model, x, options.num_samples), options.repeats)  # noqa: B023
        family = timed(
            lambda: ad.evaluate(model, batches, num_samples=options.num_samples),  # noqa: B023
            options.repeats,
        )
        a, b = statistics.median(plain), statistics.median(family)
        spread = f"{min(family) / max(plain):.2f} to {max(family) / min(plain):.2f}"
        print(f"{name:<8}{a:>12.2f} s{b:>12.2f} s{b / a:>8.2f}{spread:>16}")
    print("Required: at most 1.3 times the plain passes.")


if __name__ == "__main__":
    main()
