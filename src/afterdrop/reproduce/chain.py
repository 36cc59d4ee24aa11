"""The whole chain of a reproduction: train, evaluate and select, within some minutes, resumably.

Every job gets its share of the time: most for training, the rest for evaluation. Short probes tell
how many validation intervals and targets fit; the decision is kept in `plan.json`, so that the same
command, given again, goes on with the same plan.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from afterdrop.errors import AfterdropError, FileError
from afterdrop.evaluation import Request, Scores
from afterdrop.evaluation.loop import Execution
from afterdrop.family.member import Grid
from afterdrop.files import read_json, write_json
from afterdrop.masks.uniforms import Plan
from afterdrop.reproduce.jobs import MASKS, ChainJob
from afterdrop.runs import Run
from afterdrop.selection import select
from afterdrop.train import TrainConfig, shorten
from afterdrop.train import run as train_run

TRAINING = 0.65  # share of a job's time
PROBE_STEPS = 10
LEAST_INTERVALS = 8  # for a drop of the learning rate to be worth its name
SPLITS = {"valid": 0.45, "train": 0.3, "test": 0.25}  # shares of the time for evaluation
NINE = (0.0, 0.8, 0.9, 1.0)
_KIND, _VERSION = "afterdrop-chain", 2


@dataclass
class Chain:
    """A reproduction in a folder.

    Attributes:
        out: The folder; runs lie below `runs`.
        data: The folder of the named sets.
        minutes: Time for all jobs together.
        device: Where to train and evaluate.
        num_samples: Mask samples K.
        progress: Whether bars are shown.
        say: Where lines about the progress go.
    """

    out: Path
    data: Path | None
    minutes: float
    device: str
    num_samples: int
    progress: bool = True
    say: Callable[[str], None] = print

    def run(self, jobs: list[ChainJob]) -> tuple[list[Path], list[str]]:
        """Does all jobs; returns their run folders and what went wrong."""
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
                self.say(f"  failed: {error}")
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
            # Runs of Table 5 may differ in their masks only, so the first decides for all.
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
            if not result.finished and result.reason != "max_minutes":
                raise KeyboardInterrupt  # the run saved itself; the chain must not go on
            if not self.progress:  # else the bar has said it
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
        """As many intervals as fit, from the speed of a few steps and of a validation."""
        probe = self.out / "probe"
        shutil.rmtree(probe, ignore_errors=True)
        config = shorten(job.config, 2, PROBE_STEPS)
        result = train_run(config, probe, data=self.data, device=self.device, progress=False)
        if not result.finished:
            raise KeyboardInterrupt
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
        scores = self._scores(run, replace(request, limit=limits[split]), execution)
        run.save_scores(scores)
        self.say(f"  {scores}")

    def _request(self, job: ChainJob, split: str) -> Request:
        """Table 5 is deterministic; Table 1 needs all multipliers, Table 4 both tempers."""
        stream = Run(self.path(job)).stream()
        if job.masks:
            return Request(Grid((0.0,), (0.0,)), Plan(2), split, stream=stream)
        grid = Grid((0.0, 0.5, 1.0), NINE if split == "test" else Grid().multipliers)
        if split != "train":
            grid = replace(grid, temper="sample")
        return Request(grid, Plan(self.num_samples), split, stream=stream)

    def _fit_limit(self, run: Run, request: Request, seconds: float) -> int | None:
        """As many targets as fit, from the time that a few take; None is all."""
        few = 2 * (run.config.objective.window or 10)
        times = [time.perf_counter()]
        for limit in (few, 4 * few):  # the difference is free of what loading takes
            self._scores(run, replace(request, limit=limit), Execution())
            times.append(time.perf_counter())
        a_few = max(times[2] - 2 * times[1] + times[0], 1e-3) / 3
        limit = int(few * seconds / a_few)
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
        content = read_json(path, _KIND, _VERSION)
        if content["asked"] != self._asked():
            raise FileError(
                f"{path} was made for {_listed(content['asked'])}, now it is "
                f"{_listed(self._asked())}; give the same options to go on, or another --out"
            )
        return content["jobs"]

    def _write_plan(self, plans: Mapping[str, Any]) -> None:
        content = {"asked": self._asked(), "jobs": dict(plans)}
        write_json(self.out / "plan.json", _KIND, _VERSION, content)

    def _asked(self) -> dict[str, Any]:
        """What the plan depends on."""
        return {"minutes": self.minutes, "device": self.device, "num_samples": self.num_samples}


def fit_intervals(
    config: TrainConfig, seconds: float, step: float, validation: float
) -> dict[str, int]:
    """Intervals and steps per interval that fit into some seconds.

    The recipe's intervals, as many as fit; where these are too few for a drop of the learning rate,
    shorter ones, of which validation takes a fifth of the time at most.

    Args:
        config: The recipe.
        seconds: For training.
        step: Seconds of a step.
        validation: Seconds of a validation.

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
