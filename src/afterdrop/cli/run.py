"""Run folders: where things lie in them, and evaluating the model that was trained in one."""

from pathlib import Path
from typing import Any

from afterdrop.data import ImageSet, TextSet, batches
from afterdrop.errors import DataError, FileError
from afterdrop.evaluate.evaluate import Settings, run_evaluation
from afterdrop.evaluate.language import StreamSettings, evaluate_text
from afterdrop.evaluate.scores import Scores
from afterdrop.family.member import Member
from afterdrop.models import LanguageModel
from afterdrop.train import LoadedRun

IMAGES_AT_ONCE = 500


def scores_path(run: Path, split: str) -> Path:
    """The scores of a split."""
    return run / "scores" / f"{split}.safetensors"


def parts_path(run: Path, split: str) -> Path:
    """Finished parts of an evaluation that has not ended."""
    return run / "scores" / f"{split}.parts"


def member_path(run: Path) -> Path:
    """The chosen member."""
    return run / "member.json"


def load_scores(run: Path, split: str) -> Scores:
    """The scores of a split, or an error that says how to make them."""
    path = scores_path(run, split)
    if not path.exists():
        raise FileError(
            f"{run} has no scores of the split {split!r}; make them with afterdrop evaluate "
            f"(--split {split})"
        )
    return Scores.load(path)


def load_choice(run: Path) -> tuple[Member, dict[str, Any]]:
    """The chosen member and the protocol it was chosen under."""
    path = member_path(run)
    if not path.exists():
        raise FileError(f"{run} has no chosen member; choose one with: afterdrop select {run}")
    return Member.load(path), Member.load_notes(path)


def is_run(text: str) -> bool:
    """Whether a path is the folder of a training run."""
    return (Path(text) / "config.json").exists()


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
