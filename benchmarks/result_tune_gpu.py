"""A study whose trials are trained on a GPU machine without optuna, several sharing the card.

    python benchmarks/result_tune_gpu.py draw --study STUDY --batch BATCH --trials 24        # here
    python benchmarks/result_tune_gpu.py train --batch BATCH --out OUT --data DIR --mps --minutes 2
    python benchmarks/result_tune_gpu.py tell --study STUDY --results OUT/results.jsonl      # here

The recipe is ptb-10m, shortened to --intervals of 300 steps. `draw` asks the study for a batch:
first Sobol points, then points of the Gaussian process; points without a result come first. `train`
needs only torch; it writes a line for each finished trial, stops after --minutes, and resumes with
the missing trials. `tell` records the values in the study, prints the ranking and a comparison of
tuning objectives (`tuned_on`), and writes best.toml and study.html.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

import afterdrop as ad
from afterdrop import train
from afterdrop.train import DivergedError
from afterdrop.train.folder import RunFolder
from afterdrop.tune.search_space import apply_point
from afterdrop.tune.study_settings import TuneSettings, plan_study
from tuned_on import Family, comparison, worth

STEPS_PER_INTERVAL = 300
# The recipe's patience, scaled down to few intervals, would depend on the luck of one of them: the
# rate drops at the recipe's latest interval only, and all trials train equally long.
SCHEDULE = {
    "schedule.steps_per_interval": STEPS_PER_INTERVAL,
    "schedule.drop_patience": None,
    "schedule.stop_patience": None,
    "schedule.stop_targets": [],
}
GRID = ad.Grid((0.0, 0.5, 1.0), (0.0, 0.4, 0.6, 0.8, 1.0))
SAMPLES = 20
STRIPES = 4  # few, so that little of a short text is read from a zero state
GRACE = 10.0  # seconds that a worker has to save after a stop request


def draw(options: argparse.Namespace) -> None:
    """Draws points without training them; each counts as pending for the next."""
    from afterdrop.tune.optuna_backend import Backend
    from afterdrop.tune.study_runner import join_study
    from afterdrop.tune.trial_ledger import Ledger

    changes = {**SCHEDULE, **dict(options.set)}
    settings = plan_study(
        options.recipe, intervals=options.intervals, changes=changes, seed=options.seed
    )
    backend = Backend(options.study, None, options.study.resolve().name)
    join_study(backend, settings)
    # Trials elsewhere send no heartbeats.
    ledger = Ledger(backend, settings, "elsewhere", lease=float("inf"))
    rows = backend.trials()
    number = 1 + max((row.notes.get("round", 0) for row in rows), default=0)
    taken = [row for row in rows if row.state == "running"]
    for _ in range(options.trials):
        trial = ledger.take(len(backend.trials()) + 1)
        if trial is not None:
            backend.note(trial.number, "round", number)
            taken.append(trial)
    trials = [{"number": trial.number, "point": trial.point} for trial in taken]
    batch = {"settings": settings.to_dict(), "trials": trials}
    options.batch.write_text(json.dumps(batch, indent=1) + "\n")
    print(f"wrote {len(trials)} points to {options.batch}")


def train_batch(options: argparse.Namespace) -> None:
    """Starts the workers, ends them when the time is up, and prints their speed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the workers are ended then
    options.out.mkdir(parents=True, exist_ok=True)
    before, start = len(results(options.out)), time.time()
    until = start + 60 * options.minutes
    with card_shared(options.mps) as environment:
        command = [sys.executable, __file__, *sys.argv[1:], "--until", str(until)]
        cores = len(os.sched_getaffinity(0))
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.workers)))
        workers = [subprocess.Popen(command, env=environment) for _ in range(options.workers)]
        try:
            while time.time() < until and any(worker.poll() is None for worker in workers):
                time.sleep(0.1)
        finally:
            statuses = [ended(worker) for worker in told_to_stop(workers)]
    rows = results(options.out)[before:]
    trained = [row for row in rows if "xe" in row]
    print(
        f"{len(trained)} trials trained and {len(rows) - len(trained)} failed in "
        f"{time.time() - start:.0f} s by {options.workers} workers on "
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU'}; "
        f"{sum(row['seconds'] for row in trained):.0f} s of trials, of them "
        f"{sum(row['train_seconds'] for row in trained):.0f} s of training; exit statuses "
        f"{statuses}"
    )


@contextmanager
def card_shared(mps: bool) -> Iterator[dict[str, str]]:
    """The workers' environment, in which NVIDIA MPS runs their kernels concurrently."""
    environment = dict(os.environ)
    if not mps:
        yield environment
        return
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        sys.exit("--mps needs nvidia-cuda-mps-control, which is not here; leave it out")
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        environment |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([control, "-d"], env=environment, check=True)
        try:
            yield environment
        finally:
            subprocess.run([control], env=environment, input="quit\n", text=True, check=False)


def told_to_stop(workers: list[subprocess.Popen]) -> list[subprocess.Popen]:
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    return workers


def ended(worker: subprocess.Popen) -> int:
    try:
        return worker.wait(GRACE)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()


def results(out: Path) -> list[dict]:
    path = out / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_share(options: argparse.Namespace) -> None:
    """A worker: trains trials without a result that no other worker holds, until the time is up."""
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    batch = json.loads(options.batch.read_text())
    settings = TuneSettings.from_dict(batch["settings"])
    for trial in batch["trials"]:
        with claimed(options.out / f".claim-{trial['number']:04d}") as mine:
            done = {row["number"] for row in results(options.out)}
            if not mine or trial["number"] in done or time.time() >= options.until:
                continue
            row = try_out(options, settings, trial)
            if row is None:  # stopped early; resumes from its checkpoint
                return
            with open(options.out / "results.jsonl", "a") as file:  # one write: lines do not mix
                file.write(json.dumps({"number": trial["number"], **row}) + "\n")
            print(trial["number"], row, flush=True)
            last = run_folder(options, trial) / "checkpoint" / "last.safetensors"
            last.unlink(missing_ok=True)  # large, and no longer needed
            if "lost" in row:  # the GPU's state may be broken
                sys.exit(1)


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Claims a trial for as long as this process lives; yields whether it succeeded."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def try_out(options: argparse.Namespace, settings: TuneSettings, trial: dict) -> dict | None:
    """A trial's result, or the reason of its failure; None if the time was up first."""
    try:
        return of_trial(options, settings, trial)
    except DivergedError as error:
        return {"reason": f"diverged: {error}"}
    except torch.OutOfMemoryError as error:
        return {"reason": f"out of memory: {str(error).splitlines()[0]}"}
    except Exception as error:  # not caused by the point, which is tried again
        traceback.print_exc()
        return {"lost": f"{type(error).__name__}: {error}"}


def run_folder(options: argparse.Namespace, trial: dict) -> Path:
    return options.out / "trials" / f"{trial['number']:04d}"


def of_trial(options: argparse.Namespace, settings: TuneSettings, trial: dict) -> dict | None:
    folder = run_folder(options, trial)
    if not RunFolder(folder).last.exists():  # of a trial that was trained, or not at all
        shutil.rmtree(folder, ignore_errors=True)
    config = apply_point(settings.config, trial["point"])
    start = time.monotonic()
    left = max((options.until - time.time()) / 60, 1e-3)
    result = train.run(
        config, folder, data=options.data, device=options.device, max_minutes=left, progress=False
    )
    if not result.finished:
        return None
    trained = time.monotonic()
    found = settings.objective.of_run(folder, options.device, options.data)
    row = {**asdict(found), "xe_plain": result.best["xe"], "interval": result.best["interval"]}
    row["family"] = of_family(options, folder)
    now = time.monotonic()
    return {**row, "seconds": now - start, "train_seconds": trained - start}


def of_family(options: argparse.Namespace, folder: Path) -> dict[str, float | str]:
    """Results of the selected member; a failure affects this part only."""
    family = Family(GRID, SAMPLES, options.targets, STRIPES)
    try:
        return worth(ad.Run(folder), family, options.data, options.device)
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def tell(options: argparse.Namespace) -> None:
    """Records the results in the study; missing ones stay pending."""
    from afterdrop.report.study_page import write_study
    from afterdrop.tune.optuna_backend import Backend
    from afterdrop.tune.study_files import ranking_table, write_result
    from afterdrop.tune.study_result import StudyResult, rank
    from afterdrop.tune.trial_ledger import Ledger

    backend = Backend(options.study, None, options.study.resolve().name)
    settings = TuneSettings.from_dict(backend.settings() or {})
    ledger = Ledger(backend, settings, "elsewhere")
    trials = {row.number: row for row in backend.trials()}
    for line in options.results.read_text().splitlines():
        row = json.loads(line)
        trial = trials[row.pop("number")]
        if "reason" in row:
            ledger.fail(trial, row["reason"])
        elif "lost" in row:
            ledger.lose(trial, row["lost"])
        else:
            ledger.complete(trial, row.pop("xe"), **row)
    rows = backend.trials()
    result = StudyResult(settings, rows, [], rank(rows, [], top=5))
    print(ranking_table(result))
    print(*tuned_on(settings, rows), sep="\n")
    write_result(result, options.study)
    print(f"\nwrote {write_study(result, options.study)}")


def tuned_on(settings: TuneSettings, rows: list) -> list[str]:
    """Compares tuning objectives, per round and overall, on the validation data of the tuner."""
    pools: dict[str, list[dict]] = {}
    for row in rows:
        family = row.notes.get("family", {})
        if row.state == "complete" and "selected" in family:
            seen = {"optimal": row.value, "plain": row.notes["xe_plain"]}
            seen["temperature"] = row.notes["temperature"]
            for name in (f"round {row.notes['round']}", "all rounds"):
                pools.setdefault(name, []).append({**family, **seen})
    return [
        line
        for name, pool in sorted(pools.items())
        if len(pool) > 2 and (name != "all rounds" or len(pools) > 2)
        for line in comparison(f"{settings.recipe}, {name}: {len(pool)} trials", pool, words=True)
    ]


def setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("draw", "train", "tell"))
    parser.add_argument("--study", type=Path)
    parser.add_argument("--batch", type=Path)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--recipe", default="ptb-10m")
    parser.add_argument("--set", type=setting, nargs="*", default=[], help="NAME=JSON")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument(
        "--intervals",
        type=int,
        default=10,
        help=f"validation intervals, of {STEPS_PER_INTERVAL} steps each",
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--mps", action="store_true", help="start NVIDIA MPS for the workers")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit for all trials")
    parser.add_argument(
        "--targets", type=int, default=10_000, help="targets of each split for selection"
    )
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # passed to workers
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.action == "train":
        (train_batch if options.until is None else train_share)(options)
    else:
        {"draw": draw, "tell": tell}[options.action](options)


if __name__ == "__main__":
    main()
