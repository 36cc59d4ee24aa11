"""Loads the data set of a configuration and builds the task that trains on it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from afterdrop import data as datasets
from afterdrop.data import ImageSet, TextSet, is_own_text
from afterdrop.errors import DataError
from afterdrop.ranks import SINGLE_PROCESS, Ranks
from afterdrop.train.checks import TrainError
from afterdrop.train.config import TrainConfig
from afterdrop.train.image_task import ImageTask
from afterdrop.train.task import Task
from afterdrop.train.text_task import TextTask


def load_set(config: TrainConfig, *places: str | Path | None) -> TextSet | ImageSet:
    """The data set of a configuration.

    Args:
        config: The configuration.
        places: Folders of the named sets, of which the first one that is not None counts. Of a
            text of the user's own: folders where it may lie now, before the one it is named after.
    """
    section = config.data
    options: dict[str, Any] = {"level": section.level, "min_count": section.min_count}
    given = [place for place in places if place is not None]
    if not is_own_text(section.name):
        return datasets.load(section.name, given[0] if given else None, **options)
    texts = [place for place in given if (Path(place) / "train.txt").is_file()]
    found = datasets.load_text(texts[0] if texts else section.name, **options)
    return dataclasses.replace(found, name=section.name)


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
                f"the data are not those of the run: {name} {_difference(value, found.get(name))}; "
                "restore the data, or train in a new folder"
            )


def _difference(recorded: Any, found: Any) -> str:
    """The difference of two values, in words; for checksums the splits whose are different."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return f"of {', '.join(s for s in recorded if found.get(s) != recorded[s])} differ"
    return f"was {recorded!r:.60} and is {found!r:.60}"
