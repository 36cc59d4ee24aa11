"""A grid search over settings of dynamic evaluation, on the validation data of a run.

Scores of finished settings are kept until the search ends, so that the same search resumes
after an interruption.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

from afterdrop.data import TextSet
from afterdrop.errors import DataError
from afterdrop.evaluation.batches import digest_tensors
from afterdrop.evaluation.dynamic_evaluation import (
    DivergedWeights,
    DynamicEvaluation,
    GradientScale,
    gradient_scale,
)
from afterdrop.evaluation.loop import Execution
from afterdrop.evaluation.request import Request
from afterdrop.evaluation.scores import Scores
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.family.estimates import Estimate, estimate
from afterdrop.family.member import DET, Grid
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
from afterdrop.models.fingerprint import fingerprint
from afterdrop.runs.finished_settings import FinishedSettings
from afterdrop.runs.run import Run

TEMPERATURES = (0.5, 2.0)  # a first window of a few tokens does not tell which are of interest


@dataclasses.dataclass(frozen=True)
class Tried:
    """What some settings gave.

    Attributes:
        settings: The settings.
        scores: Their scores; None if the weights diverged.
        difference: XE minus that of fixed weights, paired by token.
    """

    settings: DynamicEvaluation
    scores: Scores | None = None
    difference: Estimate | None = None

    @property
    def xe(self) -> float:
        """XE at T = 1; infinite if the weights diverged."""
        return math.inf if self.scores is None else self.scores.xe(DET).value


class DynamicSearch:
    """Dynamic evaluation of a trained language model with several settings.

    Used as a context, which reserves the scores for one search at a time. Statistics of the
    training text are computed once for all settings that read it alike.

    Args:
        run: A run of a language model.
        window: Tokens per window.
        limit: Number of leading tokens of a split to evaluate; None for all.
        splits: The data that will be evaluated.
        device: Where the model is evaluated.
        folder: The folder of the data, if they have moved since training.

    Attributes:
        kept: The run folder of the results.

    Raises:
        DataError: If the run is not of a language model.
        FileError: On entering, if another process searches there.
    """

    def __init__(
        self,
        run: Run,
        window: int = 5,
        limit: int | None = None,
        *,
        splits: Sequence[str] = ("valid",),
        device: str | torch.device = "cpu",
        folder: str | Path | None = None,
    ) -> None:
        loaded = run.load(device=device)
        text = loaded.load_data(folder)
        if not isinstance(text, TextSet) or not isinstance(loaded.model, LanguageModel):
            raise DataError(
                f"{run.path} holds a classifier; dynamic evaluation is for language models"
            )
        self.model, self.text, self.window, self.limit = loaded.model, text, window, limit
        self.stream, self.splits = run.stream(window), splits
        self.kept = Run(run.layout.dynamic)
        self._weights = fingerprint(loaded.model)
        self._finished = 0
        self._reserved = contextlib.ExitStack()
        self._scales: dict[tuple[int, int | None], GradientScale] = {}

    def __enter__(self) -> DynamicSearch:
        with contextlib.ExitStack() as held:
            for split in self.splits:
                held.enter_context(self.kept.reserved_scores(split, overwrite=True))
            self._reserved = held.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._reserved:
            if error is not None and not isinstance(error, DivergedWeights):
                error.add_note(self._what_is_kept())
                return
            for split in self.splits:
                self._finished_settings(split).remove()

    def _what_is_kept(self) -> str:
        if not self._finished:
            return "no setting was finished, so nothing is kept: the same command starts over"
        what = "evaluation is" if self._finished == 1 else "evaluations are"
        return f"{self._finished} finished {what} kept: the same command resumes"

    def _finished_settings(self, split: str) -> FinishedSettings:
        return FinishedSettings(self.kept.layout.parts(split))

    def plain(self, split: str) -> Scores:
        """Scores of the deterministic member, with fixed weights."""
        return self._run(split, None)

    def tried(self, plain: Scores, settings: Iterable[DynamicEvaluation]) -> Iterator[Tried]:
        """What each of the settings gives on the data of `plain`."""
        fixed = plain.values(DET)
        for one in settings:
            try:
                scores = self._run(plain.split, one)
            except DivergedWeights:
                yield Tried(one)
                continue
            values = scores.values(DET).minus(fixed)
            yield Tried(one, scores, estimate(values, scores.clusters, shared=False))

    def _scale(self, settings: DynamicEvaluation) -> GradientScale:
        read = settings.stripes, settings.windows
        if read not in self._scales:
            text = self.text.train, self.text.vocabulary.eos_id, self.window
            self._scales[read] = gradient_scale(
                self.model, *text, settings, lines=self.text.has_lines
            )
        return self._scales[read]

    def _run(self, split: str, settings: DynamicEvaluation | None) -> Scores:
        grid = Grid((0.0,), (0.0,))
        request = Request(
            grid,
            Plan(2),
            split,
            temperatures=TEMPERATURES,
            stream=self.stream,
            limit=self.limit,
            dynamic=settings,
        )
        tokens, eos = self.text.split(split)[: self.limit], self.text.vocabulary.eos_id
        text, lines = (tokens, eos, request, Execution()), self.text.has_lines
        read = [tokens] if settings is None else [tokens, self.text.train]
        about = self._weights, digest_tensors(read)
        finished = self._finished_settings(split)
        file = finished.file(request, *about)
        scores = finished.read(file)
        if scores is None:
            scale = None if settings is None else self._scale(settings)
            scores = run_text(self.model, *text, lines=lines, training=scale)
            finished.save(file, scores)
        self._finished += 1
        return scores
