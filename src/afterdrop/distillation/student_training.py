"""The training of a copy on given distributions: seeded, resumable, deterministic.

The copy is in eval mode throughout: dropout is off, and the statistics of normalisation layers stay
those of training. Adam, with a learning rate that falls linearly to 0.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from afterdrop.distillation.finished_epochs import FinishedEpochs
from afterdrop.distillation.student_settings import (
    FirstBatch,
    Schedule,
    StudentSettings,
    has_fixed_order,
)
from afterdrop.distillation.teacher import Teacher, cross_entropy, entropy
from afterdrop.errors import DataError
from afterdrop.evaluation.batches import Batch, BatchReader, call, digest_tensors
from afterdrop.evaluation.kept_items import as_sequence
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.rounding import device_kind
from afterdrop.masks.model_call import tensors
from afterdrop.masks.uniforms import site_key


class StudentTraining:
    """Trains a copy in place.

    Args:
        student: The copy.
        schedule: How to train.
        teacher: What to learn.
        likelihood: Reads the copy's outputs.
        read: Reads the batches.
    """

    def __init__(
        self,
        student: nn.Module,
        schedule: Schedule,
        teacher: Teacher,
        likelihood: Categorical,
        read: BatchReader,
    ) -> None:
        self.student, self.schedule, self.teacher = student.eval(), schedule, teacher
        self.likelihood, self.reader = likelihood, read
        trained = [p for p in student.parameters() if p.requires_grad]
        if not trained:
            raise DataError("no parameter of the model requires a gradient; nothing can be trained")
        self.optimiser = torch.optim.Adam(trained, lr=schedule.lr)
        self.losses: list[float] = []
        self._resumed = ""  # what an error adds if the copy comes from a file

    def run(
        self, batches: Iterable[Any], epochs: FinishedEpochs | None = None, *, progress: bool
    ) -> tuple[float, ...]:
        """Trains to the end; returns the mean KL divergence (nats) of each epoch.

        Args:
            batches: What to train on.
            epochs: Where finished epochs are kept; None to keep nothing.
            progress: Whether to show a progress bar.
        """
        if isinstance(batches, Iterator):
            batches = as_sequence(batches)
        passes: Iterator[Iterable[Any]] = itertools.repeat(batches)
        with torch.backends.cudnn.flags(enabled=not self._recurrent()):
            if epochs is not None:
                passes = itertools.chain([self._take_up(batches, epochs)], passes)
            total = self.schedule.epochs
            bar = tqdm(total=total, initial=len(self.losses), desc="distil", disable=not progress)
            with bar:
                while len(self.losses) < total:
                    self.losses.append(self._epoch(self._ordered(next(passes))))
                    if epochs is not None:
                        epochs.write(self._tensors(), self.losses)
                    bar.set_postfix_str(f"KL {self.losses[-1]:.4f}")
                    bar.update()
        return tuple(self.losses)

    def _recurrent(self) -> bool:
        """Whether cuDNN, whose recurrent layers have no gradient in eval mode, must be off."""
        return any(isinstance(module, nn.RNNBase) for module in self.student.modules())

    def _ordered(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The batches of an epoch; those of a sequence in an order drawn by the seed."""
        if not isinstance(batches, Sequence):
            return batches
        generator = torch.Generator().manual_seed(
            site_key(self.schedule.seed, "distil", len(self.losses))
        )
        order = torch.randperm(len(batches), generator=generator).tolist()
        return map(batches.__getitem__, order)

    def _epoch(self, batches: Iterable[Any]) -> float:
        """One pass over the data; the mean divergence over its targets."""
        done = len(self.losses) / self.schedule.epochs
        for group in self.optimiser.param_groups:
            group["lr"] = self.schedule.lr * (1 - done)
        total, targets = 0.0, 0
        for number, item in enumerate(batches):
            batch = self.reader.read(item, number, 0)
            divergence, count = self._step(batch)
            total, targets = total + divergence * count, targets + count
        if not targets:
            raise DataError("batches has no targets that count; give at least one batch with some")
        return total / targets

    def _step(self, batch: Batch) -> tuple[float, int]:
        learned = self.teacher.log_probs(batch)
        if not len(learned):
            return 0.0, 0
        with torch.enable_grad():
            output = call(self.student, batch.fresh_inputs(self.likelihood.batch_dim))
            loss = cross_entropy(self.likelihood.read_output(output, batch.host, 1)[0], learned)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        divergence = (loss.detach() - entropy(learned)).item()
        if not math.isfinite(divergence):
            raise DataError(
                f"the divergence became {divergence} in epoch {len(self.losses)}; use a smaller "
                f"lr than {self.schedule.lr}" + self._resumed
            )
        return divergence, len(learned)

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"student.{name}": t for name, t in self.student.state_dict().items()}
        for number, state in self.optimiser.state_dict()["state"].items():
            found |= {f"adam.{number}.{name}": value for name, value in state.items()}
        return found

    def _take_up(self, batches: Iterable[Any], epochs: FinishedEpochs) -> Iterable[Any]:
        """Continues after the finished epochs; returns the batches of the next one."""
        stream = iter(batches)
        head = list(itertools.islice(stream, 1))
        if not head:
            raise DataError("batches is empty; give at least one (inputs, targets) pair")
        batch = self.reader.read(head[0], 0, 0)
        read = [*tensors(batch.given), self.likelihood.counts(batch.host)]
        outputs = self.teacher.output_summary(batch)
        device = device_kind(batch.targets.device)
        first = FirstBatch(digest_tensors(read), outputs, has_fixed_order(batches), device)
        trained = (name for name, p in self.student.named_parameters() if p.requires_grad)
        settings = StudentSettings(self.schedule, tuple(trained), operator.length_hint(batches))
        found = epochs.take_up(settings, first)
        if found is not None:
            try:
                self._check(*found)
            except ValueError as error:
                raise epochs.damaged(error) from error
            self._load(*found)
            self._resumed = f", or remove {epochs.file}, from which it was resumed"
        return batches if isinstance(batches, Sequence) else itertools.chain(head, stream)

    def _load(self, kept: dict[str, Tensor], losses: tuple[float, ...]) -> None:
        """Puts the copy and Adam into the state after the finished epochs."""
        self.losses = list(losses)
        self.student.load_state_dict(_part(kept, "student."))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in _part(kept, "adam.").items():
            number, key = name.split(".", 1)
            moments.setdefault(int(number), {})[key] = value
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": moments, "param_groups": groups})

    def _check(self, tensors: dict[str, Tensor], losses: tuple[float, ...]) -> None:
        """Requires the tensors of this copy and of Adam, and no more epochs than there are."""
        if not 1 <= len(losses) <= self.schedule.epochs:
            raise ValueError(f"it has {len(losses)} epochs of {self.schedule.epochs}")
        if not all(map(math.isfinite, losses)):
            raise ValueError("a divergence is not finite")
        wanted = {f"student.{name}": t for name, t in self.student.state_dict().items()}
        (group,) = self.optimiser.param_groups
        step = torch.tensor(0.0)
        for number, parameter in enumerate(group["params"]):
            of_adam = {"step": step, "exp_avg": parameter, "exp_avg_sq": parameter}
            # Adam keeps nothing of a parameter that no output depends on.
            if any(f"adam.{number}.{name}" in tensors for name in of_adam):
                wanted |= {f"adam.{number}.{name}": tensor for name, tensor in of_adam.items()}
        if wrong := sorted(wanted.keys() ^ tensors.keys()):
            raise ValueError(f"the tensor {wrong[0]} is missing or unknown")
        adam = wanted.keys() - {f"student.{name}" for name in self.student.state_dict()}
        for name, tensor in wanted.items():
            found = tensors[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise ValueError(f"{name} is {found.dtype} of shape {tuple(found.shape)}")
            if not found.isfinite().all():
                raise ValueError(f"{name} has numbers that are not finite")
            if name.endswith((".exp_avg_sq", ".step")) and name in adam and (found < 0).any():
                raise ValueError(f"{name} has negative numbers")


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
