"""Loads the data set of a configuration and builds the task that trains on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from afterdrop import data as datasets
from afterdrop.data import ImageSet, TextSet
from afterdrop.errors import DataError
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.train.checks import TrainError
from afterdrop.train.config import TrainConfig
from afterdrop.train.image_task import ImageTask
from afterdrop.train.task import Task
from afterdrop.train.text_task import TextTask


def load_set(config: TrainConfig, data: str | Path | None = None) -> TextSet | ImageSet:
    """The data set of a configuration, from the folder of the named sets."""
    section = config.data
    return datasets.load(section.name, data, level=section.level, min_count=section.min_count)


def build_task(
    config: TrainConfig,
    data: TextSet | ImageSet,
    device: torch.device,
    ranks: Ranks = SINGLE_PROCESS,
) -> Task:
    """The task of a configuration on its data.

    Raises:
        DataError: If the kind of model does not match the data.
    """
    if config.model.kind == "language_model" and isinstance(data, TextSet):
        return TextTask(config, data, device, ranks)
    if config.model.kind == "classifier" and isinstance(data, ImageSet):
        return ImageTask(config, data, device, ranks)
    raise DataError(
        f"model.kind is {config.model.kind!r} and {data.name} is a set of "
        f"{'images' if isinstance(data, ImageSet) else 'text'}; "
        "a language_model reads text and a classifier images. Change one of them."
    )


def require_same(recorded: dict[str, Any], found: dict[str, Any]) -> None:
    """Requires that the data are those that a run has recorded.

    Raises:
        TrainError: If they are not; the message names the first difference.
    """
    for name, value in recorded.items():
        if found.get(name) != value:
            raise TrainError(
                f"the data are not those of the run: {name} was {value!r} and is "
                f"{found.get(name)!r}. Restore the data, or train in a new folder."
            )
