"""Does the bandit beat random search, and does tuning at the optimal temperature rank better?

    python benchmarks/result_tune.py --work FOLDER            # stopped, it goes on

Small models on builtin data. First, studies with the Gaussian-process bandit and with random
search, equal trials, several seeds: the best value that each has found, and what its best
configuration is worth under other seeds. Second, the configurations of the random studies as a
pool: how DET at T = 1 and DET at its optimal T (both on validation data) rank them, against the
XE of the member that `select` chooses for each, on the same data and on test data; and the test XE
of what each would pick.
"""

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

import afterdrop as ad
from afterdrop.evaluate.evaluate import Settings
from afterdrop.masks.uniforms import Plan
from afterdrop.train import load_model
from afterdrop.trained import evaluate_run
from afterdrop.tune.ledger import ends, origin
from afterdrop.tune.settings import TuneSettings, plan_study
from afterdrop.tune.study import StudyResult, tune

GRID = ad.Grid((0.0, 1.0), (0.0, 0.8))
SAMPLES = 8
RESAMPLES = 2000
TASKS = {
    "digits": {"turns": 4, "changes": {}, "trials": 20, "seeds": 5},
    "pydoc": {
        "turns": 4,
        "changes": {
            "model.hidden_sizes": [32],
            "data.min_count": 20,
            "objective.batch_size": 50,
            "objective.window": 16,
            "schedule.steps_per_turn": 60,
            "validation.rows": 64,
        },
        "trials": 16,
        "seeds": 3,
    },
    # Trained six times as long; one random study as a pool of configurations, no search.
    "digits-long": {"turns": 24, "changes": {}, "trials": 48, "seeds": 1},
}


def study_settings(task: str, sampler: str, seed: int) -> TuneSettings:
    recipe = {"digits": "digits-mlp", "pydoc": "pydoc-small"}[task.partition("-")[0]]
    setup = TASKS[task]
    return plan_study(
        recipe,
        turns=setup["turns"],
        changes=setup["changes"],
        sampler=sampler,
        seed=seed,
        own_first=False,  # no hint for either
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


def worth(run: Path) -> dict[str, float]:
    """XE of DET at T = 1 and at its best T, and of the selected member, on validation and test."""
    kept = run / "worth.json"
    if kept.exists():
        return json.loads(kept.read_text())
    loaded = load_model(run)
    stream = {"stripes": loaded.config.validation.rows} if loaded.config.objective.window else {}
    valid = evaluate_run(loaded, "valid", Settings(GRID, Plan(SAMPLES)), stream, None)
    member = ad.select(valid, folds=0, resamples=0).member
    grid = ad.Grid((member.alpha,), (member.multiplier,))
    test = evaluate_run(loaded, "test", Settings(grid, Plan(SAMPLES), "test"), stream, None)
    found = {
        "plain": valid.xe(ad.DET).value,
        "optimal": valid.xe(valid.fit(ad.DET).member).value,
        "temperature": valid.fit(ad.DET).member.temperature,
        "selected_valid": valid.xe(member).value,
        "selected": test.xe(member).value,
        "multiplier": member.multiplier,
    }
    kept.write_text(json.dumps(found))
    return found


def ranking(task: str, work: Path) -> list[str]:
    pool = []
    for seed in range(TASKS[task]["seeds"]):
        result = run_study(task, "random", seed, work)
        for row in ends(result.trials):
            if row.state == "complete":
                pool.append(worth(work / f"{task}-random-{seed}/trials/{origin(row):04d}"))
    names = ("plain", "optimal", "selected", "selected_valid")
    plain, optimal, selected, same = (np.array([p[name] for p in pool]) for name in names)
    draws = np.random.default_rng(0).integers(len(pool), size=(RESAMPLES, len(pool)))
    rho = {
        "validation": bootstrap(draws, (plain, optimal), same),
        "test": bootstrap(draws, (plain, optimal), selected),
    }
    picked = np.array([[selected[d][c[d].argmin()] for c in (plain, optimal)] for d in draws])
    temperatures = sorted(p["temperature"] for p in pool)
    random_share = sum(p["multiplier"] > 0 for p in pool) / len(pool)
    lines = [
        f"\n### {task}: {len(pool)} random configurations\n",
        f"Optimal T of DET from {temperatures[0]:.2f} to {temperatures[-1]:.2f}; the selected "
        f"member is not deterministic for {random_share:.0%} of them.\n",
        "| tuned on | rank correlation with the selected member's validation XE "
        "| with its test XE | test XE of the pick |",
        "|---|---|---|---|",
    ]
    for i, (name, values) in enumerate(
        (("DET at T = 1", plain), ("DET at its optimal T", optimal))
    ):
        cells = [
            f"{spearmanr(values, target)[0]:.3f} ± {rho[split][:, i].std():.3f}"
            for split, target in (("validation", same), ("test", selected))
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {selected[values.argmin()]:.4f} |")
    gains = [found[:, 1] - found[:, 0] for found in rho.values()]
    pick = picked[:, 1] - picked[:, 0]
    cells = [f"{g.mean():+.3f} ± {g.std():.3f}" for g in gains]
    lines.append(f"| difference | {' | '.join(cells)} | {pick.mean():+.4f} ± {pick.std():.4f} |")
    return lines


def bootstrap(draws: np.ndarray, tuned: tuple, target: np.ndarray) -> np.ndarray:
    """Rank correlations of what is tuned on with a target, for each resample of the pool."""
    return np.array([[spearmanr(c[d], target[d])[0] for c in tuned] for d in draws])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    compared = [task for task in options.tasks if TASKS[task]["seeds"] > 1]
    search = [line for task in compared for line in against_random(task, options.work)]
    ranks = [line for task in options.tasks for line in ranking(task, options.work)]
    print("\n## Bandit against random search", *search, sep="\n")
    print("\n## What to tune on", *ranks, sep="\n")


if __name__ == "__main__":
    main()
