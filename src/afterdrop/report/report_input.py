"""What a report needs from a run folder, and a list of what is missing or inconsistent."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from afterdrop.errors import AfterdropError, FileError
from afterdrop.evaluation import Scores
from afterdrop.masks.sites import effective_draws
from afterdrop.plain_text import one_line, shell_word
from afterdrop.report.class_counts import Classes, classes_of_data, classes_of_file
from afterdrop.runs import Run, read_contents
from afterdrop.selection import Choice
from afterdrop.train import TrainConfig
from afterdrop.tune.study_settings import STUDY_FILE


@dataclass
class ReportInput:
    """What a report shows of a run.

    Attributes:
        run: The run.
        split: The split used for selection.
        config: The training configuration, or None if nothing was trained here.
        facts: What training recorded in addition.
        metrics: Lines of the training curves.
        scores: The scores of `split`.
        test: Scores of test data.
        train: Scores of training data, for the fit of each member.
        choice: The saved choice.
        classes: Names and training counts.
        missing: What is missing or inconsistent, with the remedy.
    """

    run: Run
    split: str
    config: TrainConfig | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    scores: Scores | None = None
    test: Scores | None = None
    train: Scores | None = None
    choice: Choice | None = None
    classes: Classes | None = None
    missing: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """The folder, as the user wrote it."""
        return self.run.path

    @property
    def word(self) -> str:
        """The folder as a word of a shell command."""
        return shell_word(self.path)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return one_line(self.run.name)

    @property
    def study(self) -> Path | None:
        """The page of the study that this run is a trial of."""
        page = self.path.resolve().parent.parent / "study.html"
        return page if page.exists() else None

    @property
    def unit(self) -> str:
        """What a target is: word, char or byte for texts, otherwise example or image."""
        return str(self.facts.get("unit", "example"))


def is_study(path: Path) -> bool:
    """Whether a folder contains a finished study."""
    return (path / STUDY_FILE).exists()


def read_input(
    path: Path, split: str = "valid", classes: Path | None = None, data: Path | None = None
) -> ReportInput:
    """Reads what a report needs of a run folder.

    Args:
        path: The folder.
        split: The split used for selection.
        classes: JSON file of names and training counts of the classes, for a user's own model.
        data: The folder of the named data sets, if it differs from that of training.

    Raises:
        FileError: If there is nothing to report, or `classes` cannot be read.
    """
    _refuse_study(path)
    contents = read_contents(Run.open(path))
    found = ReportInput(
        contents.run,
        split,
        contents.config,
        contents.facts,
        contents.metrics,
        contents.scores.get(split),
        contents.scores.get("test") if split != "test" else None,
        contents.scores.get("train") if split != "train" else None,
        contents.choice,
    )
    found.missing += list(contents.faults.values())
    if split not in contents.scores and split not in contents.faults:
        found.missing.append(
            f"{path} has no scores of the split {split!r}; make them with afterdrop evaluate "
            f"(--split {shell_word(split)})"
        )
    if contents.choice is None and "choice" not in contents.faults:
        found.missing.append(
            f"{path} has no choice; choose a member with: afterdrop select {found.word}"
        )
    if found.test is None and "test" not in contents.faults:
        found.missing += _no_test_scores(found)
    if classes is not None:
        found.classes = classes_of_file(classes)
    elif found.config is not None:
        try:
            places = data, found.facts.get("data_folder")
            found.classes = classes_of_data(found.config, places, found.facts["data"])
        except AfterdropError as error:
            found.missing.append(str(error))
    _check(found)
    _check_weights(found, contents.fingerprints)
    return found


def _refuse_study(path: Path) -> None:
    """Refuses the folder of a study, whose trials are the runs."""
    if Run(path).trained or not path.is_dir():
        return
    if is_study(path):
        raise FileError(
            f"{path} is a study, whose page afterdrop report {shell_word(path)} writes; its trials "
            f"are runs, such as {path / 'trials' / '0000'}"
        )
    if (path / "journal.log").exists():
        raise FileError(
            f"{path} is a study that has not finished; the command that started it resumes it"
        )


def _no_test_scores(found: ReportInput) -> list[str]:
    if found.config is not None:
        return [f"there are no test scores; make them with: afterdrop test {found.word}"]
    if found.scores is None:
        return []
    return [
        "there are no test scores, so the gain is measured on the data used for selection; "
        "evaluate your model with --split test to confirm it"
    ]


def _check(found: ReportInput) -> None:
    """Removes what does not belong to the scores, and lists it as missing."""
    if found.scores is None:
        return
    _check_models(found, found.scores)
    _check_contents(found, found.scores)


def _check_models(found: ReportInput, scores: Scores) -> None:
    """Removes what belongs to weights other than those of the scores."""
    mine = scores.protocol.fingerprint
    if found.test is not None and found.test.protocol.fingerprint != mine:
        found.test = None
        found.missing.append(
            f"the test scores are of another model than those of {found.split} (other weights), so "
            f"they are left out; make them again with: afterdrop test {found.word} --overwrite"
        )
    if found.train is not None and found.train.protocol.fingerprint != mine:
        found.train = None
        found.missing.append(
            f"the train scores are of another model than those of {found.split} (other weights), "
            f"so they are left out; make them again with: afterdrop evaluate {found.word} --split "
            "train --overwrite"
        )
    if found.choice is not None and found.choice.fingerprint != mine:
        found.missing.append(
            f"choice.json was made for another model than that of these scores (other weights); "
            f"choose again with: afterdrop select {found.word}"
        )
        found.choice = None


def _check_contents(found: ReportInput, scores: Scores) -> None:
    """Removes a choice and class names that do not fit the scores; lists undefined values."""
    chosen = None if found.choice is None else found.choice.member
    if chosen is not None and chosen.at_temperature(1.0) not in scores.members:
        found.missing.append(
            f"the chosen member ({chosen}) is not among those of these scores; choose again "
            f"with: afterdrop select {found.word}"
        )
        found.choice = None
    if found.classes is not None and len(found.classes.names) != scores.num_kinds:
        found.missing.append(
            f"there are names and counts of {len(found.classes.names)} classes and the model has "
            f"{scores.num_kinds}; correct the file passed to --classes, or the data"
        )
        found.classes = None
    for name, what in effective_draws(scores.protocol.off):
        found.missing.append(
            f"training was random in another way too, which no member has: {name or '(root)'} "
            f"{what}; rates=('attribute',) treats the skipping of layers as a dropout site"
        )
    broken = [m for m in scores.members if not torch.isfinite(scores.values(m).whole).all()]
    if broken:
        found.missing.append(
            f"{len(broken)} of {len(scores.members)} members give some target an infinite or "
            "undefined cross entropy (logits of NaN or −inf at a target); figures leave them out. "
            "Check the model's outputs on these data, then evaluate again"
        )


def _check_weights(found: ReportInput, kept: set[str]) -> None:
    """Reports scores of weights other than those in the checkpoints, if there are any."""
    if found.config is None or found.scores is None:
        return
    if kept and found.scores.protocol.fingerprint not in kept:
        found.missing.append(
            f"the scores of {found.split} are of other weights than those in this folder's "
            f"checkpoint; make them again with: afterdrop evaluate {found.word} --overwrite"
        )
