"""The running means of a configuration: made, written to checkpoints, and restored from them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from afterdrop.train.averaging import WeightAverage
from afterdrop.train.checkpoint import Checkpoint, grouped
from afterdrop.train.sections import AveragingSection
from afterdrop.train.two_tailed import Tails, TwoTailedAverage

Average = WeightAverage | TwoTailedAverage
_GROUPS = ("average", "short", "frozen")


def first_average(model: nn.Module, section: AveragingSection) -> TwoTailedAverage | None:
    """The averaging that begins with the first step, if there is one."""
    return TwoTailedAverage(model, section.patience) if section.kind == "two-tailed" else None


def average_tensors(average: Average | None) -> dict[str, Tensor]:
    """What a checkpoint holds of an average."""
    groups = {} if average is None else average.saved()
    return {n: t for name, group in groups.items() for n, t in grouped(name, group).items()}


def average_facts(average: Average | None) -> dict[str, Any]:
    """The facts of an average in a checkpoint: its steps, and the state of two-tailed averaging."""
    tails = asdict(average.tails) if isinstance(average, TwoTailedAverage) else None
    return {"averaged": None if average is None else average.count, "tails": tails}


def restored_average(
    model: nn.Module, section: AveragingSection, saved: Checkpoint
) -> Average | None:
    """The average of a checkpoint."""
    two, count = first_average(model, section), saved.facts["averaged"]
    if two is not None:
        groups = {name: saved.group(name) for name in _GROUPS}
        two.restore(groups, count, Tails(**saved.facts["tails"]))
        return two
    if count is None:
        return None
    average = WeightAverage(model)
    average.restore(saved.group("average"), count)
    return average
