"""What can be read from a run folder, and why the rest cannot: for pages and tables.

A page about a run whose test scores are damaged shows everything else, so a fault is noted here
and does not raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from afterdrop.errors import AfterdropError
from afterdrop.evaluation import Scores
from afterdrop.runs.run import Run
from afterdrop.selection import Choice
from afterdrop.train import TrainConfig

_Read = TypeVar("_Read")


@dataclass
class RunContents:
    """What a run folder holds, as far as it can be read.

    Attributes:
        run: The run.
        config: The training configuration; None if nothing was trained here.
        facts: What training recorded beside it.
        metrics: Lines of the training curves.
        scores: Scores by split.
        choice: The choice; None if none was made.
        fingerprints: Of the weights that the folder holds.
        faults: What could not be read: "config", "metrics", "checkpoint", "choice" or the name of a
            split, with the reason.
    """

    run: Run
    config: TrainConfig | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, Scores] = field(default_factory=dict)
    choice: Choice | None = None
    fingerprints: set[str] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)


def read_contents(run: Run) -> RunContents:
    """Reads a run folder."""
    found = RunContents(run)

    def attempt(what: str, read: Callable[[], _Read]) -> _Read | None:
        try:
            return read()
        except AfterdropError as error:
            found.faults[what] = str(error)
            return None

    if run.trained:
        found.config = attempt("config", lambda: run.config)
        found.facts = run.facts if found.config is not None else {}
        found.metrics = attempt("metrics", lambda: run.metrics) or []
        found.fingerprints = set((attempt("checkpoint", lambda: run.fingerprints) or {}).values())
    for split in run.splits:
        scores = attempt(split, lambda split=split: run.scores(split))  # type: ignore[misc]
        if scores is not None:
            found.scores[split] = scores
    if run.has_choice:
        found.choice = attempt("choice", lambda: run.choice)
    return found
