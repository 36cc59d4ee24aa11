"""What a run's scores come to: the choice, its gain, and how certain that is."""

import math
from dataclasses import dataclass

from afterdrop.errors import AfterdropError
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.estimates import Estimate
from afterdrop.family.member import DET, Member
from afterdrop.report.run import Run
from afterdrop.selection.choice import Selection, select


@dataclass(frozen=True)
class Outcome:
    """The numbers that a report leads with.

    Attributes:
        scores: That members were chosen on.
        member: The chosen one; the best, if none was chosen yet.
        tempered: The deterministic member at its own best temperature.
        selection: The ranking and its checks, or None if members cannot be ranked.
        gain: Over deterministic evaluation at T = 1, on the same data.
        test: Scores of test data that hold the chosen member, or None.
        test_gain: On test data, or None.
        num_samples: Samples of the predictor.
    """

    scores: Scores
    member: Member
    tempered: Member
    selection: Selection | None
    gain: Estimate
    test: Scores | None
    test_gain: Estimate | None
    num_samples: int

    @property
    def evidence(self) -> tuple[Estimate, str]:
        """The most honest estimate of the gain there is, and where it comes from."""
        if self.test_gain is not None:
            return self.test_gain, "on test data, which nothing was chosen on"
        if self.selection is not None and self.selection.crossfit is not None:
            return (
                self.selection.crossfit,
                "cross-fitted: chosen on some examples, measured on others",
            )
        return self.gain, "on the data that it was chosen on, which flatters it"

    @property
    def temperature_share(self) -> float:
        """Share of the gain that temperature alone gives; NaN without a gain."""
        if not self.gain.value > 0:
            return math.nan
        return -self.scores.difference(self.tempered, DET).value / self.gain.value


def find_outcome(run: Run, *, checks: bool = True) -> Outcome | None:
    """The outcome of a run, or None if there are no usable scores; says what is missing.

    Args:
        run: The run; what cannot be told is added to what it misses.
        checks: Also the cross-fitted gain and resampled choices, which take most of the time.
    """
    scores = run.scores
    if scores is None:
        return None
    finite = all(math.isfinite(scores.xe(m).value) for m in scores.members)
    selection = None
    num_samples = int(run.notes.get("num_samples", scores.num_samples))
    if finite and scores.split.strip().lower() != "test":
        folds, resamples = (5, 200) if checks else (0, 0)
        try:
            selection = select(scores, num_samples=num_samples, folds=folds, resamples=resamples)
        except AfterdropError as error:  # of a choice for far fewer samples than there are now
            run.missing.append(f"the ranking of members: {error}")
    member = run.chosen or (selection.member if selection else None)
    if member is None or not all(math.isfinite(scores.xe(m).value) for m in (member, DET)):
        run.missing.append(
            "the members cannot be ranked, so nothing is said about a choice or its gain"
        )
        return None
    gain = scores.difference(DET, member, num_samples)
    test_gain = None
    if run.test is not None:
        try:
            test_gain = run.test.difference(DET, member, num_samples)
        except AfterdropError as error:
            run.missing.append(f"the test scores do not hold the chosen member: {error}")
    tempered = scores.fit(DET).member
    test = None if test_gain is None else run.test
    return Outcome(scores, member, tempered, selection, gain, test, test_gain, num_samples)
