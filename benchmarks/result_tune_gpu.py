"""A study whose trials are trained on a GPU machine that has no optuna, several sharing the card.

    python benchmarks/result_tune_gpu.py draw --study STUDY --batch batch.json --trials 24   # here
    python benchmarks/result_tune_gpu.py train --batch batch.json --out OUT --data DIR --workers 6
    python benchmarks/result_tune_gpu.py tell --study STUDY --results OUT/results.jsonl      # here

The recipe is ptb-10m, shortened to --turns of 300 steps. `draw` asks the study for a batch: Sobol
points at first, and of the Gaussian process once results were told. `train` needs torch alone; it
writes a line for each trial as it ends, and goes on with those that are missing. `tell` gives the
values to the study, prints the ranking and writes best.toml and study.html.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from afterdrop import train
from afterdrop.train import DivergedError
from afterdrop.tune.settings import TuneSettings, plan_study
from afterdrop.tune.space import apply_point

STEPS_PER_TURN = 300


def draw(options: argparse.Namespace) -> None:
    """Asks for points without training them: each is pending for the next."""
    from afterdrop.tune.backend import Backend
    from afterdrop.tune.ledger import Ledger
    from afterdrop.tune.study import join

    changes = {"schedule.steps_per_turn": STEPS_PER_TURN}
    settings = plan_study("ptb-10m", turns=options.turns, changes=changes, seed=options.seed)
    backend = Backend(options.study, None, options.study.resolve().name)
    join(backend, settings)
    ledger = Ledger(backend, settings, "elsewhere", lease=float("inf"))  # no heart beats there
    given = len(backend.trials())
    taken = [ledger.take(given + options.trials) for _ in range(options.trials)]
    trials = [{"number": t.number, "point": t.point} for t in taken if t is not None]
    batch = {"settings": settings.to_dict(), "trials": trials}
    options.batch.write_text(json.dumps(batch, indent=1) + "\n")
    print(f"wrote {len(trials)} points to {options.batch}")


def train_batch(options: argparse.Namespace) -> None:
    """Starts the workers, each with its share of the batch, and says how fast they were."""
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    shares = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--share", str(index)])
        for index in range(options.workers)
    ]
    statuses = [share.wait() for share in shares]
    minutes = (time.monotonic() - start) / 60
    lines = (options.out / "results.jsonl").read_text().splitlines()
    done = [json.loads(line) for line in lines]
    seconds = sum(row.get("seconds", 0) for row in done)
    print(
        f"{len(done)} trials in {minutes:.1f} minutes by {options.workers} workers on "
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU'}; "
        f"{seconds / 60:.1f} minutes of trials; exit statuses {statuses}"
    )


def train_share(options: argparse.Namespace) -> None:
    """Trains every n-th trial of the batch that has no result yet."""
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    batch = json.loads(options.batch.read_text())
    settings = TuneSettings.from_dict(batch["settings"])
    results = options.out / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    known = {json.loads(line)["number"] for line in lines}
    for trial in batch["trials"][options.share :: options.workers]:
        if trial["number"] not in known:
            row = {"number": trial["number"], **worth(options, settings, trial)}
            with open(results, "a") as file:  # one write of one line: workers do not mix
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


def worth(options: argparse.Namespace, settings: TuneSettings, trial: dict) -> dict:
    folder = options.out / "trials" / f"{trial['number']:04d}"
    config = apply_point(settings.config, trial["point"])
    start = time.monotonic()
    try:
        result = train.run(config, folder, data=options.data, device=options.device, progress=False)
    except DivergedError as error:
        return {"reason": f"diverged: {error}"}
    except torch.OutOfMemoryError as error:
        return {"reason": f"out of memory: {str(error).splitlines()[0]}"}
    found = settings.objective.of_run(folder, options.device, options.data)
    (folder / "checkpoint" / "last.safetensors").unlink(missing_ok=True)
    seconds = time.monotonic() - start
    return {**asdict(found), "seconds": seconds, "xe_plain": result.best["xe"]}


def tell(options: argparse.Namespace) -> None:
    """Gives the results to the study; what is missing stays pending."""
    from afterdrop.tune.backend import Backend
    from afterdrop.tune.ledger import Ledger
    from afterdrop.tune.page import write_page
    from afterdrop.tune.rerun import rank
    from afterdrop.tune.result import table, write_result
    from afterdrop.tune.study import StudyResult

    backend = Backend(options.study, None, options.study.resolve().name)
    settings = TuneSettings.from_dict(backend.settings() or {})
    ledger = Ledger(backend, settings, "elsewhere")
    trials = {row.number: row for row in backend.trials()}
    for line in options.results.read_text().splitlines():
        row = json.loads(line)
        trial = trials[row.pop("number")]
        if "reason" in row:
            ledger.fail(trial, row["reason"])
        else:
            ledger.complete(trial, row.pop("xe"), **row)
    rows = backend.trials()
    result = StudyResult(settings, rows, [], rank(rows, [], top=5))
    print(table(result))
    write_result(result, options.study)
    print(f"wrote {write_page(result, options.study)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("draw", "train", "tell"))
    parser.add_argument("--study", type=Path)
    parser.add_argument("--batch", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--turns", type=int, default=10, help=f"of {STEPS_PER_TURN} steps each")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--share", type=int, help="which worker this is; for the script itself")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.action == "train":
        (train_batch if options.share is None else train_share)(options)
    else:
        {"draw": draw, "tell": tell}[options.action](options)


if __name__ == "__main__":
    main()
