"""A run as tables read it: its configuration, its Scores, and words for what is missing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afterdrop.data import TextSet
from afterdrop.errors import FileError, ScoresError
from afterdrop.evaluation import Scores
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import Member
from afterdrop.reproduce.tables.paper_table import PaperTable
from afterdrop.runs import Run, read_contents
from afterdrop.train import TrainConfig

SPLITS = ("train", "valid", "test")


@dataclass
class TableInput:
    """What a run folder holds.

    Attributes:
        path: The folder.
        config: How it was trained; None where someone's own model was evaluated.
        facts: What its `config.json` says besides.
        scores: Those that can be used, by split.
        faults: Why those of a split cannot be used, with the remedy.
    """

    path: Path
    config: TrainConfig | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Scores] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name or str(self.path)

    @property
    def data(self) -> str:
        """Name of the data set."""
        return self.config.data.name if self.config else "own data"

    @property
    def unit(self) -> str:
        """What a target is: `word`, `char`, `byte`, `image`, or `target` if unknown."""
        return self.facts.get("unit", "target")

    @property
    def parameters(self) -> int | None:
        """Number of weights."""
        return self.facts.get("parameters")

    def but(self, *names: str) -> str:
        """The configuration without some settings: equal for runs that differ in those only."""
        content = {} if self.config is None else self.config.to_dict()
        for name in names:
            section, _, setting = name.rpartition(".")
            (content.get(section, {}) if section else content).pop(setting, None)
        return json.dumps(content or {"path": str(self.path)}, sort_keys=True)

    def label(self, split: str) -> str:
        """The run and the data that its numbers are of, in words."""
        scores = self.scores[split]
        size = "" if self.parameters is None else f", {self.parameters / 1e6:.1f}M weights"
        some = "first " if scores.request.limit is not None else ""
        samples = f", K = {scores.num_samples}" if scores.protocol.grid.stochastic else ""
        what = f"{split}, {some}{scores.num_targets:,} targets{samples}"
        return f"{self.name}: {self.data}{size}; {what}"

    def protocol_note(self, split: str) -> str:
        """How a text was read; empty for other data."""
        stream = self.scores[split].request.stream
        if stream is None:
            return ""
        stripes = "the exact stream" if stream.stripes == 1 else f"{stream.stripes} stripes"
        return (
            f"{self.name}, {split}: windows of {stream.window} tokens, {stripes}, "
            f"{stream.carry} carry."
        )

    def command(self, split: str, *, more: str = "") -> str:
        """What makes the Scores of a split."""
        what = f"{self.path}" if self.config else f"MODEL DATA --out {self.path}"
        short = " --limit 10000" if split == "train" and self.config else ""
        return f"afterdrop evaluate {what} --split {split}{short}{more}"

    def has(self, split: str, table: PaperTable) -> bool:
        """Whether there are Scores of a split; if not, the table says how to make them."""
        if split in self.scores:
            return True
        table.miss(
            self.faults.get(split)
            or f"{self.name} has no Scores of the split {split!r}; make them with: "
            f"{self.command(split)}"
        )
        return False

    def xe(self, split: str, member: Member, table: PaperTable) -> Estimate | None:
        """A member's cross entropy; None where it was not evaluated, which the table then says.

        One that is not finite is returned, and the table says so.
        """
        scores = self.scores[split]
        try:
            found = scores.xe(member)
        except ScoresError as error:
            grid = scores.protocol.grid
            again = self.command(split, more=" --overwrite")
            if member.at_temperature(1.0) in scores.members:
                table.miss(f"{self.name}, {split}: {error}: {again} --temperatures LOW HIGH")
            else:
                table.miss(
                    f"{self.name} has {split} Scores of alphas {_listed(grid.alphas)} and "
                    f"multipliers {_listed(grid.multipliers)} only; for the rest: {again}"
                )
            return None
        if not math.isfinite(found.value):
            table.miss(
                f"{self.name}: cross entropies on {split} are not finite for some members (a "
                "diverged model, or classes of probability 0); those cells are as they are. "
                f"Train again, then: {self.command(split, more=' --overwrite')}"
            )
        return found

    def counts(self, folder: Path | None) -> Tensor:
        """[V] how often each class occurs in training.

        Raises:
            AfterdropError: If the data cannot be had.
        """
        if self.config is None:
            raise ScoresError(
                f"{self.name} was not trained here, so nobody knows the frequencies of its "
                "classes; use Scores.by_frequency with your counts"
            )
        loaded = Run(self.path).data(folder)
        if isinstance(loaded, TextSet):
            return torch.tensor(loaded.vocabulary.counts)
        return loaded.train.labels.bincount(minlength=loaded.classes)


def read_table_input(path: str | Path) -> TableInput:
    """Reads a run folder: its configuration, and all Scores that belong to its weights.

    Raises:
        FileError: If there is no such folder, or it holds nothing of a run.

    Example:
        >>> read_table_input("nowhere")
        Traceback (most recent call last):
        afterdrop.errors.FileError: nowhere is not a folder; give one that afterdrop train or \
afterdrop evaluate wrote
    """
    run = Run.open(path)
    contents = read_contents(run)
    if run.trained and contents.config is None:
        raise FileError(contents.faults["config"])
    found = TableInput(run.path, contents.config, contents.facts)
    found.scores = {s: scores for s, scores in contents.scores.items() if s in SPLITS}
    for split in SPLITS:
        if split in contents.faults:
            again = found.command(split, more=" --overwrite")
            found.faults[split] = f"{contents.faults[split]}; make them again with: {again}"
    _drop_strangers(found, contents.fingerprints)
    return found


def _drop_strangers(found: TableInput, known: set[str]) -> None:
    """Removes Scores of other weights than the run's, or than those of its validation scores."""
    if not known and found.scores:  # scores may be kept without their weights
        first = found.scores.get("valid") or next(iter(found.scores.values()))
        known = {first.protocol.fingerprint}
    for split, scores in list(found.scores.items()):
        if scores.protocol.fingerprint not in known:
            del found.scores[split]
            found.faults[split] = (
                f"{found.name} has {split} Scores of another model (its weights differ); make "
                f"them again with: {found.command(split, more=' --overwrite')}"
            )


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
