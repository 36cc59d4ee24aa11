"""Scores and the chosen member in a run folder."""

from pathlib import Path
from typing import Any

from afterdrop.errors import FileError
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.member import DET, Member
from afterdrop.selection.choice import Selection


def scores_path(run: Path, split: str) -> Path:
    """The scores of a split."""
    if not split.strip() or Path(split).name != split:
        raise FileError(f"split={split!r} names a file in the run folder; use a plain word")
    return run / "scores" / f"{split}.safetensors"


def member_path(run: Path) -> Path:
    """The chosen member."""
    return run / "member.json"


def load_scores(run: Path, split: str) -> Scores:
    """The scores of a split, or an error that says how to make them."""
    path = scores_path(_folder(run), split)
    if not path.exists():
        raise FileError(
            f"{run} has no scores of the split {split!r}; make them with afterdrop evaluate "
            f"(--split {split})"
        )
    return Scores.load(path)


def load_choice(run: Path) -> tuple[Member, dict[str, Any]]:
    """The chosen member and the protocol it was chosen under."""
    path = member_path(_folder(run))
    if not path.exists():
        raise FileError(f"{run} has no chosen member; choose one with: afterdrop select {run}")
    return Member.load(path), Member.load_notes(path)


def save_choice(run: Path, scores: Scores, choice: Selection) -> dict[str, Any]:
    """Writes the chosen member with the protocol it was chosen under, which is returned."""
    protocol = scores.protocol
    notes = {
        "num_samples": choice.num_samples,
        "seed": protocol.plan.seed,
        "masks": protocol.plan.scheme,
        "split": protocol.split,
        "fingerprint": protocol.fingerprint,
        "stream": dict(protocol.stream),
        "rates": protocol.rates,
        "temperatures": (protocol.low, protocol.high),
        "deterministic_temperature": scores.fit(DET).member.temperature,
    }
    choice.member.save(member_path(run), notes)
    return notes


def _folder(run: Path) -> Path:
    if not run.is_dir():
        raise FileError(f"{run} is no folder; give the one that afterdrop train or evaluate wrote")
    return run
