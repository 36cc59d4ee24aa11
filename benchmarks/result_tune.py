"""Does the bandit beat random search, and does tuning at the optimal temperature rank better?

    python benchmarks/result_tune.py --work FOLDER            # the same command resumes

Uses small models on built-in data. First, studies with the Gaussian-process bandit and with random
search, with equal numbers of trials and several seeds: the best value found, and the XE of the best
configuration with other seeds. Second, the configurations of the random studies as a pool: the rank
correlation of DET at T = 1, and of DET at its optimal T (both on validation data), with the XE of
the member that `select` chooses, on the same data and on test data; and the test XE of the picks.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

import afterdrop as ad
from afterdrop.tune.study_result import StudyResult
from afterdrop.tune.study_runner import run_study as tune
from afterdrop.tune.study_settings import TuneSettings, plan_study
from afterdrop.tune.trials import ends, origin
from tuned_on import Family, comparison, worth

FAMILY = Family(ad.Grid((0.0, 1.0), (0.0, 0.8)), samples=8)
TASKS = {
    "digits": {"intervals": 4, "changes": {}, "trials": 20, "seeds": 5},
    "pydoc": {
        "intervals": 4,
        "changes": {
            "model.hidden_sizes": [32],
            "data.min_count": 20,
            "objective.batch_size": 50,
            "objective.window": 16,
            "schedule.steps_per_interval": 60,
            "validation.stripes": 64,
        },
        "trials": 16,
        "seeds": 3,
    },
    # Trained six times as long; one random study as a pool of configurations, no search.
    "digits-long": {"intervals": 24, "changes": {}, "trials": 48, "seeds": 1},
}


def study_settings(task: str, sampler: str, seed: int) -> TuneSettings:
    recipe = {"digits": "digits-mlp", "pydoc": "pydoc-small"}[task.partition("-")[0]]
    setup = TASKS[task]
    return plan_study(
        recipe,
        intervals=setup["intervals"],
        changes=setup["changes"],
        sampler=sampler,
        seed=seed,
        own_first=False,  # no prior knowledge for either
        prune=False,  # equal trials
    )


def run_study(task: str, sampler: str, seed: int, work: Path) -> StudyResult:
    settings = study_settings(task, sampler, seed)
    folder = work / f"{task}-{sampler}-{seed}"
    trials = TASKS[task]["trials"]
    return tune(
        settings, folder, trials=trials, top=1, reruns=2, devices=["cpu"], quiet=True, workers=1
    )


def against_random(task: str, work: Path) -> list[str]:
    trials = TASKS[task]["trials"]
    marks = (trials // 4, trials // 2, trials)
    lines = [
        f"\n### {task}: {trials} trials, {TASKS[task]['seeds']} seeds\n",
        f"| search | {' | '.join(f'best of {n}' for n in marks)} | best, run again |",
        f"|---|{'---|' * (len(marks) + 1)}",
    ]
    again = {}
    for sampler in ("gp", "random"):
        curves, reruns = [], []
        for seed in range(TASKS[task]["seeds"]):
            result = run_study(task, sampler, seed, work)
            values = [row.value for row in ends(result.trials)]
            curves.append([min(v for v in values[:n] if v is not None) for n in marks])
            reruns.append(result.ranking[0].mean)
            print(task, sampler, seed, curves[-1], reruns[-1], flush=True)
        again[sampler] = reruns
        cells = [shown([curve[i] for curve in curves]) for i in range(len(marks))]
        lines.append(f"| {sampler} | {' | '.join(cells)} | {shown(reruns)} |")
    gains = [g - r for g, r in zip(again["gp"], again["random"])]
    lines.append(f"\nRun again, bandit minus random search, paired by seed: {shown(gains)} nats.")
    return lines


def shown(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.4f} ± {error:.4f}"


def pool_of(task: str, work: Path) -> list[dict[str, float]]:
    """The results of each configuration of the random studies, stored next to its run."""
    pool = []
    for seed in range(TASKS[task]["seeds"]):
        result = run_study(task, "random", seed, work)
        for row in ends(result.trials):
            if row.state == "complete":
                run = work / f"{task}-random-{seed}/trials/{origin(row):04d}"
                kept = run / "worth.json"
                if not kept.exists():
                    kept.write_text(json.dumps(worth(ad.Run(run), FAMILY)))
                pool.append(json.loads(kept.read_text()))
    return pool


def ranking(task: str, work: Path) -> list[str]:
    pool = pool_of(task, work)
    return comparison(f"{task}: {len(pool)} random configurations", pool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    compared = [task for task in options.tasks if TASKS[task]["seeds"] > 1]
    search = [line for task in compared for line in against_random(task, options.work)]
    ranks = [line for task in options.tasks for line in ranking(task, options.work)]
    print("\n## Bandit and random search", *search, sep="\n")
    print("\n## What to tune on", *ranks, sep="\n")


if __name__ == "__main__":
    main()
