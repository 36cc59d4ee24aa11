"""Training one deterministic pass on the distributions of a choice."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from afterdrop.distillation.finished_epochs import finished_epochs
from afterdrop.distillation.kept_gain import KeptGain, kept_gain
from afterdrop.distillation.student_settings import Schedule
from afterdrop.distillation.student_training import StudentTraining
from afterdrop.distillation.teacher import Teacher
from afterdrop.errors import DataError, MemberError
from afterdrop.evaluation.batches import BatchReader
from afterdrop.evaluation.kept_items import as_sequence
from afterdrop.evaluation.likelihoods.build_likelihood import build_likelihood
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.loop import Execution, run_evaluation
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.member import DET, Grid, Member
from afterdrop.masks.model_call import LogitsPlace
from afterdrop.masks.model_guard import guarded
from afterdrop.selection.choice import Choice
from afterdrop.selection.predictor import Predictor
from afterdrop.selection.ranking import select


@dataclasses.dataclass(frozen=True)
class Distilled:
    """A deterministic copy of a model, and what it keeps of a choice.

    Attributes:
        model: The copy, in eval mode. It has its dropout modules still, which are off.
        choice: How to predict with it, chosen as the first choice was: deterministic, at a
            temperature; None without validation data. It exports and saves.
        kept: Share of the gain that the copy keeps on the validation data; None without them.
        divergences: Mean KL divergence (nats) of the chosen member from the copy, per epoch.
        teacher: The choice that it was made of.
    """

    model: nn.Module
    choice: Choice | None
    kept: KeptGain | None
    divergences: tuple[float, ...]
    teacher: Choice

    @property
    def member(self) -> Member:
        """How the copy predicts."""
        return DET if self.choice is None else self.choice.member

    def compare(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        split: str = "test",
        logits: LogitsPlace | None = None,
        memory: int | None = None,
        progress: bool = False,
    ) -> KeptGain:
        """What the copy keeps on other data, such as those of a test.

        Args:
            model: The model that was copied.
            batches: Pairs (inputs, targets), as for `evaluate`.
            split: Name of the data.
            logits: As for `distil`.
            memory: Bytes for accumulators and activations.
            progress: Whether to show progress bars.
        """
        batches = as_sequence(batches)
        execution = Execution(memory=memory, progress=progress)
        request = self.teacher.test_request(split)
        whole = run_evaluation(model, batches, request, execution, logits=logits)
        own = _copy_scores(self.model, self.teacher, batches, split, logits, execution)
        teacher = self.teacher
        return kept_gain(whole, teacher.member, teacher.deterministic, own, self.member)

    def __str__(self) -> str:
        first, last = self.divergences[0], self.divergences[-1]
        lines = [f"KL divergence {first:.4f} nats in the first epoch, {last:.4f} in the last."]
        if self.kept is not None:
            lines += [str(self.kept), f"The copy predicts as: {self.member}"]
        return "\n".join(lines)


def distil(
    choice: Choice,
    model: nn.Module,
    batches: Iterable[Any],
    *,
    valid: Iterable[Any] | None = None,
    epochs: int = 20,
    lr: float = 1e-3,
    seed: int = 0,
    logits: LogitsPlace | None = None,
    memory: int | None = None,
    resume: str | Path | None = None,
    progress: bool = False,
) -> Distilled:
    """Trains a deterministic copy of a model to predict as a choice does, in one pass.

    The copy starts from the model's weights and learns the chosen member's distributions (KL
    divergence) with dropout off. Then its temperature is chosen as that of any model is. The model
    itself is left as it was.

    Args:
        choice: Of one model on batches of examples, with classes as targets.
        model: The model that was evaluated.
        batches: Inputs to learn from, as pairs (inputs, targets) or what else `evaluate` takes. Of
            the targets only `ignore_index` is read: positions that have it do not count. A list is
            shuffled by the seed; a loader has its own order.
        valid: Labelled data that `batches` does not contain, on which the temperature is chosen and
            the share of the gain measured; those that the choice was made on will do.
        epochs: Passes over `batches`. The member's distributions are computed in the first one, and
            kept as far as memory allows.
        lr: Adam's learning rate at the beginning; it falls linearly to 0.
        seed: Of the order of the batches.
        logits: The function that finds the logits in the model's output, if one was given to
            `evaluate`.
        memory: Bytes for accumulators and activations, and for kept distributions.
        resume: A folder for finished epochs. The same call resumes an interrupted distillation
            from there and ends with the same weights; other settings, data or code are refused.
            The file in it, which one call at a time can use, stays until the result is returned:
            an interruption while `valid` is evaluated loses that evaluation only.
        progress: Whether to show progress bars.

    Returns:
        The copy, its choice, and which share of the gain it keeps.

    Raises:
        MemberError: If the chosen member is deterministic: it is one pass already.
        DataError: If the choice is of a text, of an ensemble, or of targets other than classes.
        FileError: If the file in `resume` is damaged, in use, or of another distillation.

    Example:
        >>> import afterdrop as ad
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        >>> data = [(torch.randn(64, 4), torch.randint(3, (64,)))]
        >>> choice = ad.select(ad.evaluate(net, data, grid=ad.Grid((1,), (1,)), num_samples=8))
        >>> choice = dataclasses.replace(choice, member=ad.AMC)
        >>> found = distil(choice, net, data, epochs=5)
        >>> found.divergences[-1] < found.divergences[0]
        True
    """
    if choice.member.deterministic:
        raise MemberError(
            f"the chosen member is {choice.member}, which is one pass already; export or use it"
        )
    predictor = choice.predictor(model, logits=logits, memory=memory)
    likelihood = build_likelihood(choice.request, logits)
    if not isinstance(predictor, Predictor) or type(likelihood) is not Categorical:
        raise DataError(
            f"this choice is of {_kind(choice)}; distil takes choices of one model on batches of "
            "examples, with classes as targets"
        )
    likelihood = dataclasses.replace(likelihood, class_dim=predictor.request.class_dim)
    with guarded(model):  # not while another thread runs it under masks
        student = copy.deepcopy(model)
    request = choice.test_request(choice.request.split)
    request = dataclasses.replace(request, logits=predictor.request.logits)
    schedule = Schedule(epochs, lr, seed, choice.member, request, choice.fingerprint)
    teacher = Teacher(predictor, likelihood, memory)
    reader = BatchReader(student, likelihood, choice.request)
    training = StudentTraining(student, schedule, teacher, likelihood, reader)
    with finished_epochs(resume) as kept:
        with torch.no_grad():
            divergences = training.run(batches, kept, progress=progress)
        found = Distilled(student, None, None, divergences, choice)
        if valid is None:
            return found
        return _measured(
            found, model, as_sequence(valid), logits, Execution(memory=memory, progress=progress)
        )


def _measured(
    found: Distilled,
    model: nn.Module,
    valid: Sequence[Any],
    logits: LogitsPlace | None,
    execution: Execution,
) -> Distilled:
    """With the temperature of the copy, and the share of the gain that it keeps."""
    choice, split = found.teacher, found.teacher.request.split
    scores = _copy_scores(found.model, choice, valid, split, logits, execution)
    found = dataclasses.replace(found, choice=select(scores))
    shown: Any = {"memory": execution.memory, "progress": execution.progress}
    kept = found.compare(model, valid, split=split, logits=logits, **shown)
    return dataclasses.replace(found, kept=kept)


def _copy_scores(
    student: nn.Module,
    choice: Choice,
    batches: Sequence[Any],
    split: str,
    logits: LogitsPlace | None,
    execution: Execution,
) -> Scores:
    """Scores of the copy with dropout off."""
    request = dataclasses.replace(choice.test_request(split), grid=Grid((0.0,), (0.0,)))
    return run_evaluation(student, batches, request, execution, logits=logits)


def _kind(choice: Choice) -> str:
    if choice.ensemble is not None:
        return "an ensemble"
    return "a text" if choice.request.stream is not None else f"{choice.request.likelihood} targets"
