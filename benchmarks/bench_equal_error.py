"""The PTB-sized batch at equal error: time and memory until XE is as exact as the peer's at K = 50.

The model and the batch are those of `bench_language_batch`, after a few training steps. The error
is the root mean square, over seeds of masks, of the distance of XE of the arithmetic mean to its
limit: for torch-uncertainty XE at K = 50, for afterdrop the corrected XE. The smallest K whose
error is no larger competes with K = 50 of the peer, and K = 50 with K = 50. torch-uncertainty does
not control the dropout inside nn.LSTM. If it is not installed, independent masks without
correction stand in for its error, and a loop of 50 passes for its time.

    python benchmarks/bench_equal_error.py [--device cuda] [--seeds 20]

Memory is that of the GPU; on a CPU it is not measured (`bench_language_batch` does).
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afterdrop as ad
from bench_language_batch import BATCH, SAMPLES, TIME, TYPES, WordModel

COUNTS = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, SAMPLES)
GRID = ad.Grid((1.0,), (0.0, 1.0))


def peer_or_stand_in(model: nn.Module) -> tuple[str, Callable[[Tensor, Tensor, int], float]]:
    """XE of the mean of 50 samples with torch's own masks, by the peer or by a loop."""
    flat = nn.Sequential(model, nn.Flatten(0, 1))
    try:
        from torch_uncertainty.methods import mc_dropout
    except ImportError:

        @torch.no_grad()
        def loop(tokens: Tensor, targets: Tensor, seed: int) -> float:
            torch.manual_seed(seed)
            model.train()
            mean = sum(flat(tokens).softmax(-1) for _ in range(SAMPLES)) / SAMPLES
            model.eval()
            return F.nll_loss(mean.log(), targets.flatten()).item()

        return "plain loop", loop
    wrapped = mc_dropout(flat, num_estimators=SAMPLES, on_batch=True).eval()

    @torch.no_grad()
    def peer(tokens: Tensor, targets: Tensor, seed: int) -> float:
        torch.manual_seed(seed)
        samples = wrapped(tokens).view(SAMPLES, targets.numel(), -1)
        return F.nll_loss(samples.softmax(-1).mean(0).log(), targets.flatten()).item()

    return "torch-uncertainty", peer


def timed(run: Callable[[], object], repeats: int, device: torch.device) -> tuple[float, float]:
    """Seconds of the fastest run, and MiB of GPU memory that it adds."""
    cuda = device.type == "cuda"
    run()
    seconds, peak = math.inf, math.nan
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, peak


def rms(errors: list[float]) -> float:
    return math.sqrt(sum(e * e for e in errors) / len(errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--truth", type=int, default=4000, help="samples of the reference")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    tokens, targets = (torch.randint(TYPES, (BATCH, TIME), device=device) for _ in range(2))
    model = WordModel().to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimiser.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimiser.step()
    model.eval()

    def ours(samples: int, seed: int) -> ad.Scores:
        return ad.evaluate(model, [(tokens, targets)], grid=GRID, num_samples=samples, seed=seed)

    truth = ours(options.truth, 10**6).xe(ad.AMC)
    print(
        f"torch {torch.__version__}, {device}, {options.seeds} seeds; limit {truth.corrected:.5f} "
        f"± {truth.mc_error:.5f} (masks), from K = {options.truth}",
        flush=True,
    )
    seeds = range(options.seeds)
    name, peer = peer_or_stand_in(model)
    if name == "torch-uncertainty":
        found = [peer(tokens, targets, seed) for seed in seeds]
    else:
        found = [
            ad.evaluate(
                model, [(tokens, targets)], grid=GRID, num_samples=SAMPLES, seed=seed, masks="iid"
            )
            .xe(ad.AMC)
            .value
            for seed in seeds
        ]
    goal = rms([xe - truth.corrected for xe in found])
    print(f"{name}, K = {SAMPLES}: error {goal:.5f}")
    equal = SAMPLES
    for samples in COUNTS:
        error = rms([ours(samples, seed).xe(ad.AMC).corrected - truth.corrected for seed in seeds])
        print(f"afterdrop, K = {samples}: error {error:.5f}")
        if error <= goal:
            equal = samples
            break
    theirs = timed(lambda: peer(tokens, targets, 0), options.repeats, device)
    print(f"{name:<20}K = {SAMPLES:<4}{theirs[0]:>8.3f} s{theirs[1]:>10.0f} MiB")
    for samples in sorted({equal, SAMPLES}):
        seconds, peak = timed(lambda k=samples: ours(k, 0), options.repeats, device)
        print(
            f"{'afterdrop':<20}K = {samples:<4}{seconds:>8.3f} s{peak:>10.0f} MiB   "
            f"{theirs[0] / seconds:.2f} times as fast, {peak / theirs[1]:.3f} of the memory"
        )


if __name__ == "__main__":
    main()
