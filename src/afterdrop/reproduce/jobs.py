"""The jobs of `afterdrop reproduce --all`: the paper's models, or small ones for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from afterdrop import recipes
from afterdrop.data import MNIST_FILES, NAMED_TEXTS, require_file
from afterdrop.errors import FileError
from afterdrop.train import TrainConfig

MASKS: Mapping[str, dict[str, Any]] = {
    "masks-shared": {},
    "masks-step": {"model.state_sharing": "step"},
    "masks-all": {"model.input_sharing": "sequence", "model.output_sharing": "sequence"},
    "masks-embedding": {"model.embedding_dropout": 0.1},
}


@dataclass(frozen=True)
class ChainJob:
    """One training run of the chain.

    Attributes:
        name: The name of its run folder.
        recipe: The recipe it starts from.
        changes: Settings that differ from the recipe.
        share: Its weight when the time budget is divided.
        masks: Whether it serves only Table 5, which compares kinds of masks without sampling.
    """

    name: str
    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    masks: bool = False

    @property
    def config(self) -> TrainConfig:
        """The configuration: the recipe with the changes."""
        return recipes.load(self.recipe).config.override(self.changes)


def plan_jobs(data: Path | None, *, small: bool) -> tuple[list[ChainJob], list[str]]:
    """The jobs for the data sets that are available, and the names of those that are not.

    Args:
        data: The folder of the named data sets.
        small: Whether to train small models, for a CPU, instead of those of the recipes.

    Example:
        >>> jobs, absent = plan_jobs(None, small=True)
        >>> [job.name for job in jobs]
        ['masks-shared', 'masks-step', 'masks-all', 'masks-embedding']
        >>> absent
        ['mnist', 'ptb', 'wikitext-2', 'enwik8', 'ptb-char']
    """
    wanted = _small_jobs() if small else _full_jobs()
    jobs = [job for job in wanted if is_available(job.config.data.name, data)]
    absent = [job.config.data.name for job in wanted if job not in jobs]
    if any(job.name == "enwik8" for job in jobs):  # the characters of PTB are only a substitute
        jobs = [job for job in jobs if job.name != "ptb-char"]
    base = "pydoc-small" if small or "ptb" in absent else "ptb-10m-retuned"
    jobs += [ChainJob(name, base, changes, 0.5, masks=True) for name, changes in MASKS.items()]
    return jobs, absent


def is_available(name: str, data: Path | None) -> bool:
    """Whether the files of a named data set exist; their content is checked on loading."""
    if data is None:
        return False
    if name in NAMED_TEXTS:
        text = NAMED_TEXTS[name]
        files, places = [file for file, _ in text.files], text.places(data)
    else:
        files, places = list(MNIST_FILES), [data / "mnist", data / "MNIST" / "raw", data]
    try:
        return all(require_file(file, places, "") for file in files)
    except FileError:
        return False


def _small_jobs() -> list[ChainJob]:
    """Models that can be trained within minutes on a CPU."""
    few = {"validation.max_targets": 5_000}  # a validation must not take longer than an interval
    words = {"data.level": None, "objective.batch_size": 20, **few}
    characters = {"data.level": None, **few}
    return [
        ChainJob("mnist", "mnist-mlp", {"model.hidden_sizes": [256, 256]}),
        ChainJob("ptb", "pydoc-small", {"data.name": "ptb", **words}, 2.0),
        ChainJob("wikitext-2", "pydoc-small", {"data.name": "wikitext-2", **words}, 2.0),
        ChainJob("enwik8", "pydoc-char-small", {"data.name": "enwik8", **characters}),
        ChainJob("ptb-char", "pydoc-char-small", {"data.name": "ptb-char", **characters}),
    ]


def _full_jobs() -> list[ChainJob]:
    """The published models."""
    return [
        ChainJob("mnist", "mnist-mlp", share=0.5),
        ChainJob("ptb", "ptb-24m-retuned", share=3.0),
        ChainJob("wikitext-2", "wikitext2-24m", share=3.0),
        ChainJob("enwik8", "enwik8-46m", share=2.0),
        ChainJob("ptb-char", "ptb-char", share=2.0),
    ]
