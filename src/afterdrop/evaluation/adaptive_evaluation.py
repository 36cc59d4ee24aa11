"""Evaluations that decide themselves how many samples they need (`num_samples="auto"`).

    pilot       all multipliers with few samples, on part of the data
    decision    which multipliers can still win, with how many samples (`pilot_decision`)
    main        those, on all data

The pilot's batches are kept, so that one pass over a generator is enough. The pilot's Scores stay
with those of the main evaluation (`Scores.pilot`): they are all that is known of what was dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from afterdrop.evaluation.batches import AS_GIVEN, Source
from afterdrop.evaluation.part_files import MAIN, PILOT, parts_lock
from afterdrop.evaluation.pilot_batches import divide
from afterdrop.evaluation.pilot_decision import Decision, decide, pilot_samples
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores.scores import Scores

if TYPE_CHECKING:
    from afterdrop.evaluation.loop import Execution

Run = Callable[[Iterable[Any], Request, "Execution", int | None], Scores]


def run_adaptive(
    run: Run,
    batches: Iterable[Any],
    request: Request,
    execution: Execution,
    targets: int | None = None,
    source: Source = AS_GIVEN,
) -> Scores:
    """A pilot, then what it finds necessary.

    Args:
        run: Evaluates batches: all that it is asked for.
        batches: Pairs (inputs, targets).
        request: What to evaluate; `adaptive` says how a pilot decides.
        execution: How to carry it out.
        targets: Number of targets in the data, if known.
        source: How batches are made.

    Returns:
        Scores of the multipliers that the pilot left, with the pilot's Scores.
    """
    with contextlib.ExitStack() as held:
        if execution.resume is not None:  # between its stages too
            execution.ranks.enter_on_rank0(held, parts_lock(Path(execution.resume)))
        return _run_stages(run, batches, request, execution, targets, source)


def _run_stages(
    run: Run,
    batches: Iterable[Any],
    request: Request,
    execution: Execution,
    targets: int | None,
    source: Source,
) -> Scores:
    settings = request.adaptive
    assert settings is not None
    data = divide(batches, settings.pilot_share, source)
    few = pilot_samples(request.plan, settings, data.share)
    asked = dataclasses.replace(
        request, plan=dataclasses.replace(request.plan, num_samples=few), adaptive=None
    )
    pilot = run(data.pilot, asked, _in_folder(execution, PILOT), None)
    share = data.share if targets is None else min(1.0, pilot.num_targets / targets)
    known = execution.ranks.from_rank0(lambda: dataclasses.asdict(decide(pilot, settings, share)))
    decision = Decision(tuple(known["multipliers"]), known["num_samples"])
    if execution.progress and execution.ranks.first:
        tqdm.write(_sentence(pilot, decision))
    main = dataclasses.replace(
        asked,
        grid=dataclasses.replace(request.grid, multipliers=decision.multipliers),
        plan=dataclasses.replace(request.plan, num_samples=decision.num_samples),
    )
    scores = run(data.everything, main, _in_folder(execution, MAIN), targets)
    found = dataclasses.replace(scores.protocol.request, adaptive=settings)
    protocol = dataclasses.replace(scores.protocol, request=found)
    parts = None if execution.resume is None else Path(execution.resume)
    return Scores(protocol, scores.tensors, pilot, parts)


def _in_folder(execution: Execution, name: str) -> Execution:
    if execution.resume is None:
        return execution
    return dataclasses.replace(execution, resume=Path(execution.resume) / name)


def _sentence(pilot: Scores, decision: Decision) -> str:
    shown = ", ".join(f"{m:g}" for m in decision.multipliers if m > 0)
    return (
        f"Pilot on {pilot.num_targets:,} targets: evaluating multipliers {shown} of "
        f"{len(pilot.protocol.grid.stochastic)}, with {decision.num_samples} samples each."
    )
