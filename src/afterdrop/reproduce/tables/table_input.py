"""A run as input of the tables: its configuration, its Scores, and messages for what is missing."""

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
from afterdrop.evaluation.request import SAMPLES
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import Member
from afterdrop.plain_text import shell_word
from afterdrop.reproduce.tables.paper_table import PaperTable
from afterdrop.runs import Run, read_contents
from afterdrop.train import TrainConfig

SPLITS = ("train", "valid", "test")


@dataclass
class TableInput:
    """The contents of a run folder that the tables use.

    Attributes:
        path: The folder.
        config: The training configuration; None for Scores of a user's own model.
        facts: The other facts in its `config.json`.
        scores: The usable Scores by split.
        faults: Why the Scores of a split cannot be used, with the remedy.
    """

    path: Path
    config: TrainConfig | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    scores: dict[str, Scores] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name or str(self.path)

    @property
    def data(self) -> str:
        """The name of the data set."""
        return self.config.data.name if self.config else "own data"

    @property
    def unit(self) -> str:
        """What a target is: `word`, `char`, `byte`, `image`, or `target` if unknown."""
        return self.facts.get("unit", "target")

    @property
    def parameters(self) -> int | None:
        """The number of weights, if known."""
        return self.facts.get("parameters")

    def but(self, *names: str) -> str:
        """The configuration without some settings; equal for runs that differ only in those."""
        content = {} if self.config is None else self.config.to_dict()
        for name in names:
            section, _, setting = name.rpartition(".")
            (content.get(section, {}) if section else content).pop(setting, None)
        return json.dumps(content or {"path": str(self.path)}, sort_keys=True)

    def label(self, split: str) -> str:
        """A label that names the run, its data and the split."""
        scores = self.scores[split]
        size = "" if self.parameters is None else f", {self.parameters / 1e6:.1f}M weights"
        some = "first " if scores.request.limit is not None else ""
        samples = f", K = {scores.num_samples}" if scores.protocol.grid.stochastic else ""
        what = f"{split}, {some}{scores.num_targets:,} targets{samples}"
        return f"{self.name}: {self.data}{size}; {what}"

    def protocol_note(self, split: str) -> str:
        """How a text was split into windows; empty for other data."""
        stream = self.scores[split].request.stream
        if stream is None:
            return ""
        stripes = "the exact stream" if stream.stripes == 1 else f"{stream.stripes} stripes"
        return (
            f"{self.name}, {split}: windows of {stream.window} tokens, {stripes}, "
            f"{stream.carry} carry."
        )

    def command(self, split: str, *, more: str = "") -> str:
        """The command that makes the Scores of a split."""
        path = shell_word(self.path)
        what = path if self.config else f"MODEL DATA --out {path}"
        short = " --limit 10000" if split == "train" and self.config else ""
        # A table shows every multiplier, and on validation data a pilot would drop some.
        full = f" --num-samples {SAMPLES}" if split == "valid" else ""
        return f"afterdrop evaluate {what} --split {split}{short}{full}{more}"

    def has(self, split: str, table: PaperTable) -> bool:
        """Whether there are Scores of a split; if not, the table records how to make them."""
        if split in self.scores:
            return True
        table.miss(
            self.faults.get(split)
            or f"{self.name} has no {split} Scores; make them with: {self.command(split)}"
        )
        return False

    def xe(self, split: str, member: Member, table: PaperTable) -> Estimate | None:
        """The cross entropy of a member; None if it was not evaluated, which the table records.

        A value that is not finite is returned and also recorded.
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
                    f"{self.name} has {split} Scores for alphas {_listed(grid.alphas)} and "
                    f"multipliers {_listed(grid.multipliers)} only; make the others with: {again}"
                )
            return None
        if not math.isfinite(found.value):
            table.miss(
                f"{self.name}: cross entropies on {split} are not finite for some members (a "
                "diverged model, or targets of probability 0). Train again, then: "
                f"{self.command(split, more=' --overwrite')}"
            )
        return found

    def counts(self, folder: Path | None) -> Tensor:
        """[V] training counts of the classes.

        Raises:
            AfterdropError: If the data cannot be loaded.
        """
        if self.config is None:
            raise ScoresError(
                f"{self.name} contains no training run, so the training counts of its classes are "
                "unknown; use Scores.by_frequency with your own counts"
            )
        loaded = Run(self.path).data(folder)
        if isinstance(loaded, TextSet):
            return torch.tensor(loaded.vocabulary.counts)
        return loaded.train.labels.bincount(minlength=loaded.classes)


def read_table_input(path: str | Path) -> TableInput:
    """Reads a run folder: its configuration, and all Scores that belong to its weights.

    Raises:
        FileError: If there is no such folder, or it contains no files of a run.

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
    _drop_other_models(found, contents.fingerprints)
    return found


def _drop_other_models(found: TableInput, known: set[str]) -> None:
    """Removes Scores of weights other than those of the run, or of its validation Scores."""
    if not known and found.scores:  # Scores may be kept without the weights
        first = found.scores.get("valid") or next(iter(found.scores.values()))
        known = {first.protocol.fingerprint}
    for split, scores in list(found.scores.items()):
        if scores.protocol.fingerprint not in known:
            del found.scores[split]
            found.faults[split] = (
                f"{found.name} has {split} Scores of another model (with other weights); make "
                f"them again with: {found.command(split, more=' --overwrite')}"
            )


def _listed(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
