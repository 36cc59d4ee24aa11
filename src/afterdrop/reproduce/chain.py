"""The chain of a reproduction: train, evaluate and select within a time budget, with resumption.

Every job gets a share of the time, most of it for training and the rest for evaluation. Short
probes measure how many validation intervals and targets fit. The results are kept in `plan.json`,
so that the same command continues an interrupted chain with the same plan.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from afterdrop.errors import AfterdropError, FileError
from afterdrop.evaluation import Request, Scores
from afterdrop.evaluation.loop import Execution
from afterdrop.family.member import Grid
from afterdrop.files import read_json, write_json
from afterdrop.masks.uniforms import Plan
from afterdrop.plain_text import one_line
from afterdrop.reproduce.jobs import MASKS, ChainJob
from afterdrop.runs import Run
from afterdrop.selection import select
from afterdrop.stop_request import NAMES, resumable
from afterdrop.train import TrainConfig, shorten
from afterdrop.train import run as train_run
from afterdrop.typed_records import read_record

TRAINING = 0.65  # share of the time of a job
PROBE_STEPS = 10
LEAST_INTERVALS = 8  # fewest for which dropping the learning rate is useful
SPLITS = {"valid": 0.45, "train": 0.3, "test": 0.25}  # shares of the evaluation time
NINE = (0.0, 0.8, 0.9, 1.0)
_KIND, _VERSION = "afterdrop-chain", 2


class _JobPlan(TypedDict, total=False):
    intervals: int
    steps_per_interval: int
    trained: bool
    limits: dict[str, int | None]


class _PlanRecord(TypedDict):
    asked: dict[str, Any]
    jobs: dict[str, _JobPlan]


@dataclass
class Chain:
    """A reproduction of the paper's results in a folder.

    Attributes:
        out: The folder; run folders are created in its subfolder `runs`.
        data: The folder of the named data sets.
        minutes: Time budget of all jobs together.
        device: The device to train and evaluate on.
        num_samples: Number of mask samples K.
        progress: Whether to show progress bars.
        say: Called with each line of progress.
    """

    out: Path
    data: Path | None
    minutes: float
    device: str
    num_samples: int
    progress: bool = True
    say: Callable[[str], None] = print

    def run(self, jobs: list[ChainJob]) -> tuple[list[Path], list[str]]:
        """Runs all jobs; returns their run folders and descriptions of the failures."""
        plans = self._read_plan()
        total = sum(job.share for job in jobs)
        runs, faults = [], []
        for number, job in enumerate(jobs):
            seconds = 60 * self.minutes * job.share / total
            self.say(f"[{number + 1}/{len(jobs)}] {job.name}: {seconds / 60:.1f} min planned")
            try:
                self._do(job, seconds, plans)
            except AfterdropError as error:
                faults.append(f"{job.name}: {error}")
                self.say(f"  failed: {one_line(error)}")
            if Run(self.path(job)).trained:
                runs.append(self.path(job))
        return runs, faults

    def path(self, job: ChainJob) -> Path:
        """The run folder of a job."""
        return self.out / "runs" / job.name

    def _do(self, job: ChainJob, seconds: float, plans: dict[str, Any]) -> None:
        folder = self.path(job)
        plan = plans.setdefault(job.name, {})
        if "intervals" not in plan:
            twins = [
                plans[name] for name in MASKS if job.masks and "intervals" in plans.get(name, {})
            ]
            # Runs of Table 5 must differ only in their masks, so the first one decides for all.
            fitted = twins[0] if twins else self._fit_intervals(job, TRAINING * seconds)
            plan.update({name: fitted[name] for name in ("intervals", "steps_per_interval")})
            self._write_plan(plans)
        if not plan.get("trained"):
            config = shorten(job.config, plan["intervals"], plan["steps_per_interval"])
            limit = 2 * TRAINING * seconds / 60
            result = train_run(
                config,
                folder,
                data=self.data,
                device=self.device,
                max_minutes=limit,
                progress=self.progress,
            )
            if result.reason in NAMES:
                raise resumable(result.reason)  # stop the whole chain
            if not self.progress:  # otherwise the progress bar shows it
                self.say(f"  {result.message}")
            plan["trained"] = True
            self._write_plan(plans)
        for split, share in SPLITS.items():
            self._evaluate(job, split, (1 - TRAINING) * seconds * share, plans)
        run = Run(folder)
        if not job.masks and not run.has_choice:
            choice = select(run.scores("valid"), resamples=0)
            run.save_choice(choice)
            self.say(str(choice))

    def _fit_intervals(self, job: ChainJob, seconds: float) -> dict[str, int]:
        """The number of intervals that fit, from the speed of a few steps and of a validation."""
        probe = self.out / "probe"
        shutil.rmtree(probe, ignore_errors=True)
        config = shorten(job.config, 2, PROBE_STEPS)
        result = train_run(config, probe, data=self.data, device=self.device, progress=False)
        if result.reason in NAMES:
            raise resumable(result.reason)
        _, first, second = Run(probe).metrics  # the first interval is the warm-up
        shutil.rmtree(probe)
        objective = job.config.objective
        step = objective.batch_size * (objective.window or 1) / second["targets_per_second"]
        validation = second["seconds"] - first["seconds"] - PROBE_STEPS * step
        return fit_intervals(job.config, seconds, step, max(validation, step))

    def _evaluate(self, job: ChainJob, split: str, seconds: float, plans: dict[str, Any]) -> None:
        run = Run(self.path(job))
        if split in run.splits or (job.masks and split == "train"):
            return
        limits = plans[job.name].setdefault("limits", {})
        request = self._request(job, split)
        if job.masks:
            limits[split] = None
        if split not in limits:
            limits[split] = self._fit_limit(run, request, seconds)
            self._write_plan(plans)
        execution = Execution(resume=run.layout.parts(split), progress=self.progress)
        with run.reserved_scores(split):
            scores = self._scores(run, replace(request, limit=limits[split]), execution)
            run.save_scores(scores)
        self.say(f"  {scores}")

    def _request(self, job: ChainJob, split: str) -> Request:
        """Table 5 is deterministic, Table 1 needs all multipliers, and Table 4 both tempers."""
        stream = Run(self.path(job)).stream()
        if job.masks:
            return Request(Grid((0.0,), (0.0,)), Plan(2), split, stream=stream)
        grid = Grid((0.0, 0.5, 1.0), NINE if split == "test" else Grid().multipliers)
        if split != "train":
            grid = replace(grid, temper="sample")
        return Request(grid, Plan(self.num_samples), split, stream=stream)

    def _fit_limit(self, run: Run, request: Request, seconds: float) -> int | None:
        """The number of targets that fit into the time, from a short probe; None means all."""
        few = 2 * (run.config.objective.window or 10)
        times = [time.perf_counter()]
        for limit in (few, 4 * few):  # the difference does not include loading
            self._scores(run, replace(request, limit=limit), Execution())
            times.append(time.perf_counter())
        seconds_per_few = max(times[2] - 2 * times[1] + times[0], 1e-3) / 3
        limit = int(few * seconds / seconds_per_few)
        return None if limit >= self._size(run, request.split) else max(limit, few)

    def _scores(self, run: Run, request: Request, execution: Execution) -> Scores:
        return run.evaluate(request, execution, which="best", device=self.device, folder=self.data)

    def _size(self, run: Run, split: str) -> int:
        part = getattr(run.data(self.data), split)
        return len(getattr(part, "labels", part))

    def _read_plan(self) -> dict[str, Any]:
        path = self.out / "plan.json"
        if not path.exists():
            return {}
        try:
            content = read_record(_PlanRecord, read_json(path, _KIND, _VERSION))
        except ValueError as error:
            raise FileError(
                f"{path} is damaged ({error}); restore it, or give another --out"
            ) from error
        if content["asked"] != self._asked():
            raise FileError(
                f"{path} was made with {_listed(content['asked'])}, but this command has "
                f"{_listed(self._asked())}; pass the same options to continue, or another --out"
            )
        return {name: dict(plan) for name, plan in content["jobs"].items()}

    def _write_plan(self, plans: Mapping[str, Any]) -> None:
        content = {"asked": self._asked(), "jobs": dict(plans)}
        write_json(self.out / "plan.json", _KIND, _VERSION, content)

    def _asked(self) -> dict[str, Any]:
        """The options that the plan depends on."""
        return {"minutes": self.minutes, "device": self.device, "num_samples": self.num_samples}


def fit_intervals(
    config: TrainConfig, seconds: float, step: float, validation: float
) -> dict[str, int]:
    """Intervals and steps per interval that fit into a time budget.

    Intervals have the length of the recipe, unless too few of them fit for dropping the learning
    rate; then they are shortened, such that validation takes at most a fifth of the time.

    Args:
        config: The recipe.
        seconds: Time budget of training.
        step: Seconds per step.
        validation: Seconds per validation.

    Example:
        >>> from afterdrop import recipes
        >>> config = recipes.load("mnist-mlp").config  # 60 intervals of 391 steps
        >>> fit_intervals(config, 450, 0.1, 4)
        {'intervals': 10, 'steps_per_interval': 391}
        >>> fit_intervals(config, 100, 0.1, 5)
        {'intervals': 4, 'steps_per_interval': 200}
    """
    schedule = config.schedule
    intervals = int(seconds / (schedule.steps_per_interval * step + validation))
    if intervals >= LEAST_INTERVALS:
        return {
            "intervals": min(intervals, schedule.intervals),
            "steps_per_interval": schedule.steps_per_interval,
        }
    intervals = min(max(int(0.2 * seconds / validation), 2), LEAST_INTERVALS)
    steps = int((seconds / intervals - validation) / step)
    return {"intervals": intervals, "steps_per_interval": max(1, steps)}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
