"""The outcome of a run: the choice, its gain, and the evidence for it."""

import math
from dataclasses import dataclass

from afterdrop.errors import AfterdropError
from afterdrop.evaluation import Scores
from afterdrop.evaluation.ensemble import Ensemble
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import DET, Member
from afterdrop.report.report_input import ReportInput
from afterdrop.selection import Choice, select


@dataclass(frozen=True)
class Outcome:
    """The numbers that a report leads with.

    Attributes:
        scores: The scores used for selection.
        member: The chosen member; the best one if none was chosen yet.
        tempered: The deterministic member at its optimal temperature.
        selection: The ranking and its checks, or None if members cannot be ranked.
        gain: The gain over deterministic evaluation at T = 1, on `scores`.
        test: The test scores if they contain the chosen member, or None.
        test_gain: The gain on test data, or None.
        num_samples: Number of mask samples of the predictor.
        choice: The saved choice, or None.
    """

    scores: Scores
    member: Member
    tempered: Member
    selection: Choice | None
    gain: Estimate
    test: Scores | None
    test_gain: Estimate | None
    num_samples: int
    choice: Choice | None = None

    @property
    def ensemble(self) -> Ensemble | None:
        """Whose samples these are, if they were given."""
        return self.scores.protocol.ensemble

    @property
    def evidence(self) -> tuple[Estimate, str]:
        """The least biased estimate of the gain that is available, and its origin."""
        if self.test_gain is not None:
            return self.test_gain, "on test data, which were not used for selection"
        if self.selection is not None and self.selection.crossfit is not None:
            return (
                self.selection.crossfit,
                "cross-fitted: selected on some examples and measured on the others",
            )
        return self.gain, "on the data used for selection, which makes it optimistic"

    @property
    def temperature_share(self) -> float:
        """Share of the gain that temperature alone gives; NaN if there is no gain."""
        if not self.gain.value > 0:
            return math.nan
        return -self.scores.difference(self.tempered, DET).value / self.gain.value


def find_outcome(run: ReportInput, *, checks: bool = True) -> Outcome | None:
    """The outcome of a run, or None if there are no usable scores.

    Args:
        run: The run; what cannot be determined is added to `run.missing`.
        checks: Whether to compute the cross-fitted gain and the choices on resampled examples,
            which take most of the time.
    """
    scores = run.scores
    if scores is None:
        return None
    finite = all(math.isfinite(scores.xe(m).value) for m in scores.members)
    selection = None
    num_samples = run.choice.num_samples if run.choice else scores.predictor_samples
    if finite and scores.split.strip().lower() != "test":
        folds, resamples = (5, 200) if checks else (0, 0)
        try:
            selection = select(scores, num_samples=num_samples, folds=folds, resamples=resamples)
        except AfterdropError as error:  # chosen for many fewer samples than there are now
            run.missing.append(f"the ranking of members: {error}")
    chosen = run.choice or selection
    member = chosen.member if chosen else None
    if member is None or not all(math.isfinite(scores.xe(m).value) for m in (member, DET)):
        run.missing.append(
            "the members cannot be ranked, so there is no choice and no gain to report"
        )
        return None
    gain = scores.difference(DET, member, num_samples)
    test_gain = None
    if run.test is not None:
        try:
            test_gain = run.test.difference(DET, member, num_samples)
        except AfterdropError as error:
            run.missing.append(f"the test scores do not contain the chosen member: {error}")
    tempered = scores.fit(scores.members[0]).member
    test = None if test_gain is None else run.test
    choice = run.choice
    return Outcome(scores, member, tempered, selection, gain, test, test_gain, num_samples, choice)
