"""Where things lie in a run folder."""

from pathlib import Path

from afterdrop.errors import FileError
from afterdrop.evaluate.scores import Scores


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
            f"{run} has no scores of the split {split!r}; make them with: afterdrop evaluate "
            f"MODEL DATA --out {run} --split {split}"
        )
    return Scores.load(path)
