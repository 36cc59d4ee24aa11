"""Time of an evaluation of a model with thousands of dropout sites, in plain passes.

Each site is followed by a linear map of four units, so that all time is that of the calls
themselves. Printed is CPU time: of a plain pass in eval mode, of a pass under masks, of
`find_sites`, and of an evaluation of two members with four samples; then the last as a number of
plain passes of the same run.

    python benchmarks/bench_sites.py [--sites 100 1000 10000]
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import afterdrop as ad
from afterdrop.masks.rows import Rows
from afterdrop.masks.uniforms import Plan

GRID = ad.Grid((0, 1), (0, 1))


def deep(sites: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(sites):
        linear = nn.Linear(4, 4)
        nn.init.eye_(linear.weight)
        layers += [nn.Dropout(0.001), linear]
    return nn.Sequential(*layers, nn.Linear(4, 3)).eval()


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The least CPU time of some runs."""
    times = []
    for _ in range(repeats):
        before = time.process_time()
        run()
        times.append(time.process_time() - before)
    return min(times)


@torch.no_grad()
def measure(sites: int, repeats: int) -> tuple[float, ...]:
    model, x, y = deep(sites), torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    found = ad.find_sites(model, x)
    rows = Rows(Plan(4), (1.0,), range(2), torch.arange(4))
    control = found.control(model)
    plain = seconds(lambda: model(x), repeats)
    with control.prepared((1.0,)):
        masked = seconds(lambda: control.forward(rows, x.repeat(2, 1)), repeats)
    finding = seconds(lambda: ad.find_sites(model, x), repeats)
    whole = seconds(lambda: ad.evaluate(model, [(x, y)], grid=GRID, num_samples=4), repeats)
    return plain, masked, finding, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("sites  plain pass s  masked pass s  find_sites s  evaluate s  in plain passes")
    for sites in options.sites:
        plain, masked, finding, whole = measure(sites, options.repeats)
        print(
            f"{sites:5d}  {plain:12.4f}  {masked:13.4f}  {finding:12.3f}  {whole:10.3f}"
            f"  {whole / plain:8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
