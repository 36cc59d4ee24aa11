"""Evaluating the model of a training run on the data that it was trained on."""

from pathlib import Path
from typing import Any

from afterdrop.data import ImageSet, TextSet, batches
from afterdrop.errors import DataError
from afterdrop.evaluation.api import Settings, run_evaluation
from afterdrop.evaluation.engines.text import StreamSettings, evaluate_text
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.models import LanguageModel
from afterdrop.train import LoadedRun

IMAGES_AT_ONCE = 500


def evaluate_run(
    loaded: LoadedRun, split: str, settings: Settings, stream: dict[str, Any], data: Path | None
) -> Scores:
    """Scores of a trained model on a split of the data that it was trained on.

    Args:
        loaded: The run.
        split: Which data.
        settings: Members, samples and the like; its limit cuts the split short.
        stream: Settings of `StreamSettings` for texts; the window is that of training by default.
        data: The folder of the named sets, if not the one of training.
    """
    found = loaded.load_data(data)
    if isinstance(found, TextSet) and isinstance(loaded.model, LanguageModel):
        how = StreamSettings(**{"time": loaded.config.objective.window, **stream})
        tokens, eos = found.split(split)[: settings.limit], found.vocabulary.eos_id
        return evaluate_text(loaded.model, tokens, eos, settings, how, lines=found.has_lines)
    assert isinstance(found, ImageSet)
    chosen = getattr(found, split, None)
    if chosen is None:
        raise DataError(f"{found.name} has the splits train, valid and test, not {split!r}")
    images, labels = chosen.images[: settings.limit], chosen.labels[: settings.limit]
    return run_evaluation(loaded.model, batches(images, labels, IMAGES_AT_ONCE), settings)
