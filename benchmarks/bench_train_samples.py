"""A training step with several masks in the loss on a GPU, for some sizes of programs.

    python benchmarks/bench_train_samples.py [--recipe ptb-24m-2layer-d8] [--samples 8] [--steps 40]
                                             [--limit 120] [--tiles default u64 ...] [--profile]

Trains on random tokens with the kernels. For each entry of TILES it prints the time of the first
step, which compiles; the median time of --steps steps, and what the recipe's whole schedule would
take; the share of the H200's 989 TFLOP/s; loss and effective samples of the last step, which must
not depend on the tiles. --limit SECONDS ends the program after that time: between entries, or
30 s later wherever it is. `default` is what `afterdrop train` runs.
"""

import argparse
import signal
import time

import torch

from afterdrop import recipes
from afterdrop.kernels import lstm_stack
from afterdrop.kernels.stack_sizes import MANY, StackSizes
from afterdrop.models import LanguageModel
from afterdrop.train.config import TrainConfig
from afterdrop.train.fused_text import FusedText
from afterdrop.train.optimiser import AdamTF, build_optimiser
from bench_train_gpu import DEVICE, TYPES, RandomText, milliseconds, profile_step

PEAK = 989e12  # dense 16-bit products of an H200


def tiles(
    units: int, stages: int, columns: int, splits: int = 1, *, early: bool = False
) -> StackSizes:
    """Programs of 128 by 4 · `units` forward, and by `columns` backward."""
    shared = {"BLOCK_K": 64, "num_warps": 8, "num_stages": stages}
    forward = {"BLOCK_U": units, "EARLY": early, **shared}
    return StackSizes(128, forward, {"BLOCK_N": columns, **shared}, splits)


TILES = {
    "default": MANY,
    "n128": tiles(64, 3, 128),
    "u32": tiles(32, 3, 128),
    "u32 early": tiles(32, 3, 128, early=True),
    "u32 n256": tiles(32, 3, 256, 2),
    "few rows": StackSizes(64),
}


def operations(model: LanguageModel, config: TrainConfig) -> float:
    """Floating-point operations of the products of a step: three times those forward."""
    sizes = model.config.resolved()
    H, E, L = sizes.hidden_sizes[0], sizes.embedding_size or 0, len(sizes.hidden_sizes)
    per_place = 4 * H * (E + H + (L - 1) * 2 * H) + sizes.vocabulary * E
    places = config.objective.batch_size * config.objective.samples * (config.objective.window or 1)
    return 3 * 2.0 * per_place * places


def measure(name: str, config: TrainConfig, options: argparse.Namespace) -> None:
    """Prints the times of one entry of TILES."""
    lstm_stack.stack_sizes = lambda *shape: TILES[name]  # type: ignore[assignment]
    torch.manual_seed(0)
    model = LanguageModel(config.model.language_model(TYPES[config.data.name])).to(DEVICE)
    optimiser = build_optimiser(list(model.parameters()), config.optimiser)
    assert isinstance(optimiser, AdamTF)
    optimiser.param_groups[0]["lr"] = config.optimiser.learning_rate
    start = time.perf_counter()
    fused = FusedText(RandomText(config), model, optimiser, 0)
    fused.step(0)
    torch.cuda.synchronize()
    first, number = time.perf_counter() - start, 0

    def step() -> None:
        nonlocal number
        number += 1
        fused.step(number)

    ms = milliseconds(step, options.steps)
    schedule = config.schedule
    minutes = ms * schedule.intervals * schedule.steps_per_interval / 6e4
    share = operations(model, config) / (ms * 1e-3) / PEAK
    numbers = ", ".join(f"{value:.3f}" for value in fused.steps.numbers.tolist())
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{name:<10}{ms:>9.2f} ms per step  {minutes:>6.1f} min in all  {share:>5.0%} of peak  "
        f"first step {first:.0f} s  {memory:.1f} GiB  loss, effective samples: {numbers}",
        flush=True,
    )
    if options.profile:
        profile_step(step, repeats=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="ptb-24m-2layer-d8")
    parser.add_argument("--samples", type=int, help="by default the recipe's")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=int, default=120, help="seconds")
    parser.add_argument("--tiles", nargs="*", default=list(TILES), choices=list(TILES))
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device: left out")
        return
    signal.alarm(options.limit + 30)
    torch.set_float32_matmul_precision("high")
    config = recipes.load(options.recipe).config
    if options.samples is not None:
        config = config.override({"objective.samples": options.samples})
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {options.recipe}", flush=True
    )
    start = time.perf_counter()
    for name in options.tiles:
        if time.perf_counter() - start > options.limit:
            print(f"{name:<10} not measured: {options.limit} s are over")
            continue
        try:
            measure(name, config, options)
        except Exception as error:
            print(f"{name:<10} failed: {str(error).splitlines()[0][:200]}", flush=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
