"""One door to a run folder: what training, evaluation and selection wrote there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afterdrop.data import ImageSet, TextSet, batches
from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.part_files import remove_parts, scores_lock
from afterdrop.evaluation.repeated_results import same_results
from afterdrop.evaluation.request import Carry, Lifetime, Request, StreamSettings
from afterdrop.evaluation.scores import Scores
from afterdrop.evaluation.text_evaluation import run_text
from afterdrop.masks.uniforms import Plan
from afterdrop.models import LanguageModel
from afterdrop.plain_text import shell_word
from afterdrop.run_layout import RunLayout
from afterdrop.selection import Choice, EnsemblePredictor, Predictor, StreamPredictor
from afterdrop.train import LoadedRun, TrainConfig, load_model
from afterdrop.train.folder import RunFolder
from afterdrop.train.load_run import Which, kept_fingerprint

IMAGES_PER_BATCH = 500
_BOTH: tuple[Which, ...] = ("best", "last")


class Run:
    """A run folder.

    Every verb of the command line reads a run and adds to it. A run has a configuration and weights
    if it was trained here; scores, once it was evaluated; and a choice, once one was made.

    Args:
        path: The folder, which need not exist yet; `Run.open` requires that it does.

    Example:
        >>> import tempfile
        >>> from afterdrop import recipes, train
        >>> config = recipes.load("digits-mlp").config.override({"schedule.intervals": 1})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = train.run(config, folder, progress=False)
        ...     run = Run.open(folder)
        ...     run.config.data.name, len(run.metrics), run.splits
        ('builtin:digits', 2, [])
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.layout = RunLayout(self.path)

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """An existing run.

        Raises:
            FileError: If there is no such folder, or it holds nothing of a run.
        """
        run = cls(path)
        if not run.path.is_dir():
            raise FileError(
                f"{path} is not a folder; give one that afterdrop train or afterdrop evaluate wrote"
            )
        if not (run.trained or run.splits or run.has_choice):
            raise FileError(
                f"{path} holds neither a training run nor scores; give a folder that afterdrop "
                "train or afterdrop evaluate wrote"
            )
        return run

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    # Training

    @property
    def trained(self) -> bool:
        """Whether a model was trained here; otherwise the run holds results of your own model."""
        return self.layout.config.exists()

    @property
    def config(self) -> TrainConfig:
        """The training configuration.

        Raises:
            FileError: If nothing was trained here.
        """
        return self._written[0]

    @property
    def facts(self) -> dict[str, Any]:
        """What training recorded beside the configuration: sizes, unit, data."""
        return self._written[1]

    @cached_property
    def _written(self) -> tuple[TrainConfig, dict[str, Any]]:
        return RunFolder(self.path).read_config()

    @property
    def unit(self) -> str:
        """What a target is: word, char or byte; example where no text was trained on."""
        return str(self.facts.get("unit", "example")) if self.trained else "example"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the training curves."""
        return RunFolder(self.path).read_metrics()

    def fingerprint(self, which: Which) -> str | None:
        """The fingerprint of the best or the last weights; None if they are not kept."""
        return kept_fingerprint(self.path, which) if self.trained else None

    @property
    def fingerprints(self) -> dict[Which, str]:
        """Fingerprints of the best and the last weights, as far as they are kept."""
        found = {which: self.fingerprint(which) for which in _BOTH}
        return {which: value for which, value in found.items() if value is not None}

    def which(self) -> Which:
        """The weights that the choice was made for; the best ones without a choice.

        Raises:
            FileError: If the run does not have those weights any more.
        """
        if not self.has_choice:
            return "best"
        for which in _BOTH:  # the last ones may be damaged where only the best are needed
            if self.fingerprint(which) == self.choice.fingerprint:
                return which
        if not self.fingerprints:
            raise FileError(
                f"{self.path} has no weights: {self.layout.best.parent} is empty or missing; "
                "restore it from a copy, or train again in a new folder"
            )
        raise FileError(
            f"the choice in {self.path} was made for other weights than the run has now; evaluate "
            f"and select again: afterdrop evaluate {shell_word(self.path)} --overwrite "
            f"&& afterdrop select {shell_word(self.path)}"
        )

    def load(self, which: Which | None = None, *, device: str | torch.device = "cpu") -> LoadedRun:
        """The model with its configuration and data.

        Args:
            which: "best" or "last" weights; None for those of the choice, or else the best.
            device: Where the model goes.
        """
        if not self.trained:
            raise FileError(
                f"{self.path} holds scores of your own model, which cannot be loaded from here; "
                "to predict: Run.choice.predictor(model); for other data: afterdrop evaluate MODEL "
                f"DATA --out {shell_word(self.path)} --split NAME"
            )
        return load_model(self.path, which or self.which(), device=device)

    def model(self, which: Which | None = None, *, device: str | torch.device = "cpu") -> nn.Module:
        """The trained model, in eval mode (`load`)."""
        return self.load(which, device=device).model

    def data(self, folder: str | Path | None = None) -> TextSet | ImageSet:
        """The data that the model was trained on; refuses any other.

        Args:
            folder: The folder of the data, if they have moved since training.
        """
        return self.load("best" if self.layout.best.exists() else "last").load_data(folder)

    # Scores and choice

    @property
    def splits(self) -> list[str]:
        """The splits that have scores."""
        return self.layout.splits()

    def scores(self, split: str = "valid") -> Scores:
        """The scores of a split.

        Raises:
            FileError: If there are none; says how to make them.
        """
        path = self.layout.scores(split)
        if not path.exists():
            raise FileError(
                f"{self.path} has no scores of the split {split!r}; make them with afterdrop "
                f"evaluate (--split {shell_word(split)})"
            )
        scores = Scores.load(path)
        if scores.split != split:
            raise FileError(
                f"{path} holds scores of the split {scores.split!r:.60}; restore the file, or "
                "remove it and evaluate again"
            )
        return scores

    def kept_scores(
        self,
        request: Request,
        weights: str | None,
        again: Callable[..., Scores] | None = None,
        epsilon: float = torch.finfo(torch.float32).eps,
    ) -> Scores:
        """The scores of a request's split, if they are of that request and of these weights.

        Args:
            request: What would be evaluated.
            weights: The fingerprint of the model.
            again: Evaluates the user's own model on all batches or the first one, because its data
                and code may be others than they were: without dropout all batches must have the
                same results, and the first one those of all members.
            epsilon: Of the coarsest dtype that this model computes with.

        Raises:
            FileError: If they are of another evaluation, or damaged.
        """
        path, scores = self.layout.scores(request.split), self.scores(request.split)
        if scores.asked != request or scores.protocol.fingerprint != weights:
            raise FileError(
                f"{path} exists and is of other settings or weights; --overwrite replaces it, "
                "another --out or --split keeps it"
            )
        if again is not None:
            temperatures = scores.protocol.low, scores.protocol.high
            whole = dataclasses.replace(scores.request, adaptive=None, temperatures=temperatures)
            grid = dataclasses.replace(request.grid, alphas=(0.0,), multipliers=(0.0,))
            plain = dataclasses.replace(whole, grid=grid, plan=Plan(2, request.plan.seed))
            if not (
                same_results(again(plain, first=False), scores, epsilon)
                and same_results(again(whole, first=True), scores, epsilon, first=True)
            ):
                raise FileError(
                    f"{path} exists and is of other data, or of a model with other code; "
                    "--overwrite replaces it, another --out or --split keeps it"
                )
        remove_parts(self.layout.parts(request.split))
        return scores

    @contextlib.contextmanager
    def reserved_scores(self, split: str, *, overwrite: bool = False) -> Iterator[None]:
        """Reserves the scores of a split for one writer, from before evaluating until saved.

        Args:
            split: The split.
            overwrite: Whether scores that exist may be replaced.

        Raises:
            FileError: If another process is evaluating the split, or there are scores already.
        """
        path = self.layout.scores(split)
        with scores_lock(self.layout.scores_lock(split), path):
            if path.exists() and not overwrite:
                raise FileError(
                    f"{path} exists; --overwrite replaces it, another --out or --split keeps it"
                )
            yield

    def save_scores(self, scores: Scores) -> Path:
        """Writes the scores of their split; returns the file."""
        path = self.layout.scores(scores.split)
        scores.save(path)
        return path

    @property
    def has_choice(self) -> bool:
        """Whether a choice was made."""
        return self.layout.choice.exists()

    @property
    def choice(self) -> Choice:
        """The choice.

        Raises:
            FileError: If none was made.
        """
        if not self.has_choice:
            raise FileError(
                f"{self.path} has no choice; choose a member with: afterdrop select "
                f"{shell_word(self.path)}"
            )
        return Choice.load(self.layout.choice)

    def save_choice(self, choice: Choice) -> Path:
        """Writes the choice; returns the file."""
        choice.save(self.layout.choice)
        return self.layout.choice

    def predictor(
        self, *, num_samples: int | None = None, device: str | torch.device = "cpu"
    ) -> Predictor | StreamPredictor | EnsemblePredictor:
        """The predictor of the choice, with the weights that it was made for.

        Args:
            num_samples: Mask samples; by default those that the choice was made for.
            device: Where the model goes.
        """
        model = self.model(device=device)
        try:
            return self.choice.predictor(model, num_samples=num_samples)
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from error

    def stream(
        self,
        window: int | None = None,
        stripes: int = 1,
        carry: Carry = "deterministic",
        lifetime: Lifetime = "window",
    ) -> StreamSettings | None:
        """How the run's text is read; None if it was not trained on a text.

        Args:
            window: Tokens per window; by default that of training.
            stripes: Contiguous shares of the text.
            carry: What a window starts from.
            lifetime: How long a mask that is shared over time lives.

        Raises:
            DataError: If settings are given that only a text has.
        """
        trained = self.config.objective.window
        if trained is not None:
            size = trained if window is None else window
            return StreamSettings(size, stripes, carry, lifetime)
        if (window, stripes, carry, lifetime) != (None, 1, "deterministic", "window"):
            raise DataError(
                f"{self.path} was trained on {self.config.data.name}, which is not a text: window, "
                "stripes, carry and lifetime are for texts"
            )
        return None

    def evaluate(
        self,
        request: Request,
        execution: Execution,
        *,
        which: Which | None = None,
        device: str | torch.device = "cpu",
        folder: str | Path | None = None,
    ) -> Scores:
        """Scores of the trained model on a split of the data that it was trained on.

        Args:
            request: Members, samples and the like; its stream settings come from `stream`.
            execution: How to carry it out.
            which: "best" or "last" weights; None for those of the choice, or else the best.
            device: Where the model is evaluated.
            folder: The folder of the data, if they have moved since training.
        """
        loaded = self.load(which, device=device)
        found, split = loaded.load_data(folder), request.split
        if isinstance(found, TextSet) and isinstance(loaded.model, LanguageModel):
            tokens, eos = found.split(split)[: request.limit], found.vocabulary.eos_id
            text = (tokens, eos, request, execution)
            return run_text(loaded.model, *text, lines=found.has_lines, training=found.train)
        assert isinstance(found, ImageSet)
        chosen = getattr(found, split, None)
        if chosen is None:
            raise DataError(f"{found.name} has the splits train, valid and test, not {split!r}")
        images, labels = chosen.images[: request.limit], chosen.labels[: request.limit]
        data = batches(images, labels, IMAGES_PER_BATCH)
        return run_evaluation(loaded.model, data, request, execution)
