"""Peak memory of an evaluation over the number of targets and of samples.

Each case runs in a process of its own: a small classifier, batches from a generator (so that the
number of targets is not known beforehand) and a budget of 64 MiB; finished parts are kept on disk,
and the tables of all members are made, as by the command line. Cases have two members, or those of
the default grid. Printed are the peak above the state before, the size of the scores, and the
difference, which should be flat.

    python benchmarks/bench_memory.py [--targets 50000 100000 200000] [--samples 64]
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import afterdrop as ad
from afterdrop.selection.text_tables import family_table

MIB = 2**20
GRIDS = {2: ad.Grid((1,), (0, 1)), len(ad.Grid()): ad.Grid()}


def batches(targets: int, size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(0, targets, size):
        yield (
            torch.randn(size, 8, generator=generator),
            torch.randint(4, (size,), generator=generator),
        )


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(targets: int, samples: int, members: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    options: dict[str, Any] = {"grid": GRIDS[members], "memory": 64 * MIB}
    ad.evaluate(model, batches(1000), num_samples=4, **options)
    before = resident()
    with tempfile.TemporaryDirectory() as folder:
        options["resume"] = Path(folder, "parts")
        scores = ad.evaluate(model, batches(targets), num_samples=samples, **options)
    for tuned in (False, True):
        family_table(scores, tuned=tuned)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print((peak - before) / MIB, sum(t.nbytes for t in scores.tensors.values()) / MIB)


def measured(*case: int) -> tuple[float, float]:
    command = [sys.executable, __file__, "--one", *map(str, case)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, size = map(float, done.stdout.split())
    return peak, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=int, nargs="+", default=[50_000, 100_000, 200_000])
    parser.add_argument("--samples", type=int, nargs="+", default=[64, 1024, 16_384])
    parser.add_argument("--one", type=int, nargs=3, help="measure one case in this process")
    options = parser.parse_args()
    if options.one:
        measure(*options.one)
        return
    print("targets  samples  members  peak MiB  scores MiB  beyond the scores MiB")
    cases = [(n, 64, 2) for n in options.targets] + [(1000, k, 2) for k in options.samples]
    for case in cases + [(n, 4, len(ad.Grid())) for n in options.targets]:
        peak, size = measured(*case)
        shown = "{:7d}  {:7d}  {:7d}".format(*case)
        print(f"{shown}  {peak:8.0f}  {size:10.0f}  {peak - size:8.0f}", flush=True)


if __name__ == "__main__":
    main()
