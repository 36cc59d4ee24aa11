"""Everything a report needs from a run folder; what cannot be read is said, the rest is kept."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from afterdrop.errors import AfterdropError, FileError
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.member import Member
from afterdrop.report.class_counts import Classes, classes_of_data, classes_of_file
from afterdrop.runs.folder import load_choice, load_scores, member_path, scores_path
from afterdrop.train.config import TrainConfig
from afterdrop.train.folder import RunFolder
from afterdrop.train.load_run import kept_fingerprints
from afterdrop.tune.study_settings import STUDY_FILE

_Read = TypeVar("_Read")


@dataclass
class Run:
    """What a run folder holds.

    Attributes:
        path: The folder, as the user wrote it.
        split: The split that members are chosen on.
        config: The training configuration, or None if nothing was trained here.
        facts: What training recorded beside it.
        metrics: Lines of the training curves.
        scores: Of `split`.
        test: Scores of test data.
        train: Scores of training data, for how well each member fits them.
        chosen: The member of `member.json`.
        notes: The protocol that it was chosen under.
        classes: Names and training counts.
        missing: What is missing or does not belong together, and how to mend it.
    """

    path: Path
    split: str
    config: TrainConfig | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    scores: Scores | None = None
    test: Scores | None = None
    train: Scores | None = None
    chosen: Member | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    classes: Classes | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def study(self) -> Path | None:
        """The page of the study that this run is a trial of."""
        page = self.path.resolve().parent.parent / "study.html"
        return page if page.exists() else None

    @property
    def unit(self) -> str:
        """What a target is: word, char, byte; example where no text was trained on."""
        return str(self.facts.get("unit", "example"))


def is_study(path: Path) -> bool:
    """Whether a folder holds a study and what came of it."""
    return (path / STUDY_FILE).exists()


def read_run(
    path: Path, split: str = "valid", classes: Path | None = None, data: Path | None = None
) -> Run:
    """Reads a run folder.

    Args:
        path: The folder.
        split: The split that members are chosen on.
        classes: JSON file of names and training counts of the classes, for a model of your own.
        data: The folder of the named data sets, if not the one of training.

    Raises:
        FileError: If there is nothing to report, or `classes` cannot be read.
    """
    run, folder = Run(path, split), RunFolder(path)
    if not any(p.exists() for p in (folder.config, path / "scores", member_path(path))):
        if is_study(path):
            raise FileError(
                f"{path} is a study, whose page afterdrop report {path} writes; its trials are "
                f"runs, such as {path / 'trials' / '0000'}"
            )
        if (path / "journal.log").exists():
            raise FileError(
                f"{path} is a study that is not over; the command that started it goes on"
            )
        raise FileError(
            f"{path} holds nothing to report: neither training nor scores; make them with "
            "afterdrop train or afterdrop evaluate"
        )
    if folder.config.exists():
        run.config, run.facts = _try(run, folder.read_config) or (None, {})
        run.metrics = _try(run, folder.read_metrics) or []
    run.scores = _try(run, lambda: load_scores(path, split))
    run.chosen, run.notes = _try(run, lambda: load_choice(path)) or (None, {})
    if scores_path(path, "test").exists() and split != "test":
        run.test = _try(run, lambda: Scores.load(scores_path(path, "test")))
    elif run.config is not None:
        run.missing.append(f"there are no test scores; make them with: afterdrop test {path}")
    elif run.scores is not None:
        run.missing.append(
            "there are no test scores, so the gain is judged on the data that chose; evaluate your "
            "model with --split test to confirm it"
        )
    if scores_path(path, "train").exists() and split != "train":
        run.train = _try(run, lambda: Scores.load(scores_path(path, "train")))
    if classes is not None:
        run.classes = classes_of_file(classes)
    elif run.config is not None:
        config, where = run.config, data or run.facts.get("data_folder")
        run.classes = _try(run, lambda: classes_of_data(config, where))
    _check(run)
    _check_weights(run)
    return run


def _try(run: Run, read: Callable[[], _Read]) -> _Read | None:
    """What `read` returns; its error, if it is one of ours, becomes something missing."""
    try:
        return read()
    except AfterdropError as error:
        run.missing.append(str(error))
        return None


def _check(run: Run) -> None:
    """Takes out what does not belong to the scores, and says so."""
    scores = run.scores
    if scores is None:
        return
    mine = scores.protocol.fingerprint
    if run.test is not None and run.test.protocol.fingerprint != mine:
        run.test = None
        run.missing.append(
            f"the test scores are of another model than those of {run.split} (other weights), so "
            f"they are left out; make them again with: afterdrop test {run.path} --overwrite"
        )
    if run.train is not None and run.train.protocol.fingerprint != mine:
        run.train = None
        run.missing.append(
            f"the scores of train are of another model than those of {run.split} (other weights), "
            "so they are left out; make them again with afterdrop evaluate --split train"
        )
    chosen_for = run.notes.get("fingerprint", mine)
    if chosen_for != mine:
        run.missing.append(
            f"member.json was chosen for another model than that of these scores (other weights); "
            f"choose again with: afterdrop select {run.path}"
        )
        run.chosen, run.notes = None, {}
    if run.chosen is not None and run.chosen.at_temperature(1.0) not in scores.members:
        run.missing.append(
            f"the chosen member ({run.chosen}) is not among those of these scores; choose again "
            f"with: afterdrop select {run.path}"
        )
        run.chosen, run.notes = None, {}
    if run.classes is not None and len(run.classes.names) != scores.protocol.num_classes:
        run.missing.append(
            f"there are names and counts of {len(run.classes.names)} classes and the model has "
            f"{scores.protocol.num_classes}; correct the file of --classes or the data"
        )
        run.classes = None
    broken = [m for m in scores.members if not torch.isfinite(scores.values(m).whole).all()]
    if broken:
        run.missing.append(
            f"{len(broken)} of {len(scores.members)} members give some target an infinite or "
            "undefined cross entropy (logits of NaN or −inf at a target); they are left out where "
            "they cannot be drawn. Look at the model's outputs on these data, then evaluate again"
        )


def _check_weights(run: Run) -> None:
    """Says if the scores are older than the weights; without checkpoints nobody can tell."""
    if run.config is None or run.scores is None:
        return
    prints = (_try(run, lambda: kept_fingerprints(run.path)) or {}).values()
    if prints and run.scores.protocol.fingerprint not in prints:
        run.missing.append(
            f"the scores of {run.split} are of other weights than those in this folder's "
            f"checkpoint; make them again with: afterdrop evaluate {run.path} --overwrite"
        )
