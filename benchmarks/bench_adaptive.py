"""Adaptive evaluation against the full grid: passes, seconds and what the choice loses.

For each task and seed of masks, `num_samples="auto"` chooses a member for 100 samples. Its XE is
read from the full grid at K = 100 with the same seed (a multiplier between grid points is evaluated
there, too). The regret is that XE minus the lowest of the full grid. Printed per task:

    passes      of pilot and main evaluation over all data, mean and largest (full: 1,000)
    seconds     of one adaptive and of one full evaluation, means (of those that were not kept); of
                the processor on a CPU
    regret      in nats, mean and largest
    to XE ±     the largest regret as a share of the standard error of the best XE
    within 1/5  share of seeds whose regret is at most a fifth of that standard error

    python benchmarks/bench_adaptive.py [--seeds 40] [--first-seed 1000] [--folder scratch]
                                        [--tasks digits cnn] [--details seeds.jsonl]

Models and full Scores are kept in the folder, so that only the first run is long. MNIST and PTB
are left out unless AFTERDROP_DATA names a folder that has them, and PTB without a GPU. A rule that
was changed after looking at some seeds has to be judged on others: --first-seed. Seeds that the
file of details has already are not measured again.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import afterdrop as ad
from adaptive_tasks import TASKS, Task
from afterdrop.errors import AfterdropError

# On a shared machine, the time that other programs take does not count.
clock = time.perf_counter if torch.cuda.is_available() else time.process_time
SAMPLES = 100
COLUMNS = ("passes", "most", "seconds", "full s", "regret", "largest", "to XE ±", "within 1/5")
COLUMNS += ("seeds",)


def full_scores(task: Task, seed: int, folder: Path) -> tuple[ad.Scores, float | None]:
    """Scores of the whole grid, and the seconds that they took, or None if they were kept."""
    path = folder / "full" / f"{task.name}-{seed}.safetensors"
    if path.exists():
        return ad.Scores.load(path), None
    start = clock()
    scores = task.evaluate(num_samples=SAMPLES, seed=seed)
    seconds = clock() - start
    path.parent.mkdir(parents=True, exist_ok=True)
    scores.save(path)
    return scores, seconds


def passes(scores: ad.Scores) -> float:
    """Passes over all data with dropout, of the pilot and of the main evaluation."""
    assert scores.pilot is not None
    share = scores.pilot.num_targets / scores.num_targets
    found = [(scores.pilot, share), (scores, 1.0)]
    return sum(p * s.num_samples * len(s.protocol.grid.stochastic) for s, p in found)


def regret(task: Task, seed: int, full: ad.Scores, member: ad.Member) -> tuple[float, float]:
    """What a member loses against the best of the full grid, and the standard error of its XE."""
    best = ad.select(full, folds=0, resamples=0).ranking[0]
    scores = full
    if member.multiplier not in full.protocol.grid.multipliers:
        grid = ad.Grid((member.alpha,), (0.0, member.multiplier))
        scores = task.evaluate(grid=grid, num_samples=SAMPLES, seed=seed)
    return scores.xe(member).value - best.xe, full.xe(best.member).error


def measured(task: Task, seed: int, folder: Path) -> dict[str, Any]:
    """What one seed evaluated, chose, lost and took."""
    full, full_seconds = full_scores(task, seed, folder)
    start = clock()
    scores = task.evaluate(num_samples="auto", seed=seed)
    seconds = clock() - start
    member = ad.select(scores, folds=0, resamples=0).member
    loss, error = regret(task, seed, full, member)
    return {
        "task": task.name,
        "seed": seed,
        "passes": passes(scores),
        "samples": scores.num_samples,
        "multipliers": scores.protocol.grid.stochastic,
        "chosen": [member.alpha, member.multiplier, member.temperature],
        "regret": loss,
        "share": loss / error,
        "seconds": seconds,
        "full_seconds": full_seconds,
    }


def table_row(name: str, found: list[dict[str, Any]]) -> str:
    """A row of the table, from all seeds of a task."""
    counts, seconds, losses, shares = (
        [seed[key] for seed in found] for key in ("passes", "seconds", "regret", "share")
    )
    full = [seed["full_seconds"] for seed in found if seed["full_seconds"] is not None]
    within = sum(share <= 0.2 for share in shares) / len(found)
    cells = (f"{statistics.mean(counts):.0f}", f"{max(counts):.0f}")
    cells += (f"{statistics.mean(seconds):.2f}", f"{statistics.mean(full):.2f}" if full else "-")
    cells += (f"{statistics.mean(losses):.4f}", f"{max(losses):.4f}")
    cells += (f"{max(shares):.3f}", f"{100 * within:.1f} %", str(len(found)))
    return f"{name:<14}" + "".join(f"{cell:>11}" for cell in cells)


def known_seeds(details: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    """What a file of details has already, by task and seed."""
    if details is None or not details.exists():
        return {}
    found = map(json.loads, details.read_text().splitlines())
    return {(seed["task"], seed["seed"]): seed for seed in found}


def all_seeds(task: Task, seeds: range, folder: Path, details: Path | None) -> list[dict[str, Any]]:
    """Measures the seeds that the file of details does not have, and adds them to it."""
    known = known_seeds(details)
    for seed in seeds:
        if (task.name, seed) in known:
            continue
        known[task.name, seed] = measured(task, seed, folder)
        if details is not None:
            with details.open("a") as file:
                file.write(json.dumps(known[task.name, seed]) + "\n")
    return [known[task.name, seed] for seed in seeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("scratch/adaptive"))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--details", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    print(f"seeds {seeds[0]} to {seeds[-1]}; the full grid has 10 multipliers x {SAMPLES} samples")
    print(f"{'task':<14}" + "".join(f"{column:>11}" for column in COLUMNS))
    for name in options.tasks:
        torch.manual_seed(0)
        try:
            task = TASKS[name](options.folder)
        except AfterdropError as error:
            print(f"{name:<14}  left out: {str(error).splitlines()[0]}")
            continue
        found = all_seeds(task, seeds, options.folder, options.details)
        print(table_row(name, found), flush=True)


if __name__ == "__main__":
    main()
