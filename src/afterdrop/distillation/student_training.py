"""The training of a copy on given distributions: seeded, resumable, deterministic.

The copy is in eval mode throughout: dropout is off, and the statistics of normalisation layers stay
those of training. Adam, with a learning rate that falls linearly to 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from afterdrop.distillation.teacher import Teacher, cross_entropy, entropy
from afterdrop.errors import DataError, FileError
from afterdrop.evaluation.batches import Batch, BatchReader, call
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.files import make_folder
from afterdrop.masks.uniforms import site_key
from afterdrop.tensor_files import read_tensors, write_tensors
from afterdrop.typed_records import read_record

_FILE = "distil.safetensors"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Everything that the weights of the copy depend on, beside model and data.

    Attributes:
        epochs: Passes over the data.
        lr: Learning rate at the beginning.
        seed: Of the order of the batches.
        teacher: The member and the weights that are learned from.
    """

    epochs: int
    lr: float
    seed: int
    teacher: str

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise DataError(f"epochs={self.epochs} must be at least 1")
        if not self.lr > 0:
            raise DataError(f"lr={self.lr} must be above 0")
        if not -(2**63) <= self.seed < 2**63:
            raise DataError("seed must fit 64 bits; give a smaller integer")


@dataclasses.dataclass(frozen=True)
class _State:
    """What the file of finished epochs says beside its tensors."""

    schedule: Schedule
    losses: tuple[float, ...]


class StudentTraining:
    """Trains a copy in place.

    Args:
        student: The copy.
        schedule: How to train.
        teacher: What to learn.
        likelihood: Reads the copy's outputs.
        read: Reads the batches.
        folder: Where finished epochs are kept; None to keep nothing.
    """

    def __init__(
        self,
        student: nn.Module,
        schedule: Schedule,
        teacher: Teacher,
        likelihood: Categorical,
        read: BatchReader,
        folder: str | Path | None = None,
    ) -> None:
        self.student, self.schedule, self.teacher = student.eval(), schedule, teacher
        self.likelihood, self.reader = likelihood, read
        trained = [p for p in student.parameters() if p.requires_grad]
        if not trained:
            raise DataError("no parameter of the model requires a gradient; nothing can be trained")
        self.optimiser = torch.optim.Adam(trained, lr=schedule.lr)
        self.losses: list[float] = []
        self._resumed = ""  # what an error adds if the copy comes from a file
        self.file = None if folder is None else Path(folder) / _FILE
        if self.file is not None:
            make_folder(self.file.parent)
            self._resume(self.file)

    def run(self, batches: Iterable[Any], *, progress: bool) -> tuple[float, ...]:
        """Trains to the end; returns the mean KL divergence (nats) of each epoch."""
        if isinstance(batches, Iterator):
            batches = list(batches)
        total = self.schedule.epochs
        bar = tqdm(total=total, initial=len(self.losses), desc="distil", disable=not progress)
        with bar, torch.backends.cudnn.flags(enabled=not self._recurrent()):
            while len(self.losses) < total:
                self.losses.append(self._epoch(self._ordered(batches)))
                self._save()
                bar.set_postfix_str(f"KL {self.losses[-1]:.4f}")
                bar.update()
        if self.file is not None:
            self.file.unlink()
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

    def _save(self) -> None:
        if self.file is not None:
            note = {"schedule": dataclasses.asdict(self.schedule), "losses": self.losses}
            write_tensors(self.file, self._tensors(), note)

    def _resume(self, file: Path) -> None:
        """Continues after the last epoch that was finished."""
        if not file.exists():
            return
        tensors, note = read_tensors(file)
        try:
            state = read_record(_State, note)
            if state.schedule != self.schedule:
                raise FileError(
                    f"{file} is of another distillation ({state.schedule}); give the same "
                    "arguments, or remove the file to begin again"
                )
            self._check(tensors, state.losses)
        except ValueError as error:
            raise FileError(
                f"{file} is damaged ({error}); remove it to begin the distillation again"
            ) from error
        self.losses = list(state.losses)
        self._resumed = f", or remove {file}, from which it was resumed"
        self.student.load_state_dict(_part(tensors, "student."))
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in _part(tensors, "adam.").items():
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
