"""Reads the model of a run, and the fingerprints of its weights, from the run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from afterdrop.data import ImageSet, TextSet
from afterdrop.errors import AfterdropError, FileError
from afterdrop.models import Classifier, ClassifierConfig, LanguageModel, LanguageModelConfig
from afterdrop.models.checks import ModelError
from afterdrop.plain_text import first_line
from afterdrop.train.build_task import build_task, load_set, require_same
from afterdrop.train.checkpoint import read_checkpoint, read_fingerprint
from afterdrop.train.checks import check_one_of
from afterdrop.train.config import TrainConfig
from afterdrop.train.folder import RunFolder
from afterdrop.train.saved_state import check_tensors

Which = Literal["best", "last"]


class LoadedRun(NamedTuple):
    """A run's model (in eval mode), its configuration, and a function that loads its data."""

    model: nn.Module
    config: TrainConfig
    load_data: Callable[..., TextSet | ImageSet]


def load_model(
    run: str | Path, which: Which = "best", *, device: str | torch.device = "cpu"
) -> LoadedRun:
    """The model of a finished or interrupted run.

    Args:
        run: The run folder.
        which: `"best"`, the weights of the lowest validation XE, or `"last"`. Both are the
            averaged weights if averaging was on.
        device: The device of the model.

    Returns:
        The model, the configuration, and `load_data(data=None)`, which loads the data of the run
        and refuses any other.

    Raises:
        FileError: If the folder does not hold a run, or does not have the checkpoint yet.

    Example:
        >>> import tempfile
        >>> from afterdrop import recipes, train
        >>> config = recipes.load("digits-mlp").config.override({"schedule.intervals": 1})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = train.run(config, folder, progress=False)
        ...     model, config, load_data = train.load_model(folder)
        >>> model(load_data().test.images).shape
        torch.Size([397, 10])
    """
    check_one_of("which", which, ("best", "last"))
    folder = RunFolder(Path(run))
    config, facts = folder.read_config()
    path = folder.best if which == "best" else folder.last
    if not path.exists():
        raise FileError(
            f"{folder.path} has no {which} checkpoint yet; train until the first validation"
        )
    weights = read_checkpoint(path).weights()
    model = _empty_model(config, facts["model"], folder.config)
    check_tensors(weights, model.state_dict(), path)
    model.load_state_dict(weights, assign=True)

    def load_data(data: str | Path | None = None) -> TextSet | ImageSet:
        try:
            loaded = load_set(config, data, facts["data_folder"])
            require_same(facts["data"], build_task(config, loaded, torch.device("cpu")).identity())
        except AfterdropError as error:
            raise type(error)(f"the data of {folder.path}: {error}") from error
        return loaded

    return LoadedRun(model.eval().to(device), config, load_data)


def _empty_model(config: TrainConfig, settings: dict[str, Any], path: Path) -> nn.Module:
    """A model without weights.

    Raises:
        FileError: If the settings are not those of a model.
    """
    try:
        with torch.device("meta"):  # no initial weights, so the caller's random state is not used
            if config.model.kind == "language_model":
                return LanguageModel(LanguageModelConfig(**settings))
            return Classifier(ClassifierConfig(**settings))
    except (ModelError, TypeError, RuntimeError) as error:  # unknown settings, sizes beyond reach
        raise FileError(
            f"{path} has invalid model settings ({first_line(error)}); restore it, or train "
            "again in a new folder"
        ) from error


def kept_fingerprint(run: str | Path, which: Which) -> str | None:
    """The fingerprint of weights that a run folder holds, read from the checkpoint's header.

    It equals the fingerprint of the model that `load_model` would build.

    Args:
        run: The run folder.
        which: `"best"` or `"last"`.

    Returns:
        The fingerprint; None if there is no such checkpoint.

    Raises:
        FileError: If the checkpoint cannot be read.
    """
    folder = RunFolder(Path(run))
    path = folder.best if which == "best" else folder.last
    return read_fingerprint(path) if path.exists() else None
