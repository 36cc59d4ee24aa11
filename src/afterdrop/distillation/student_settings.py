"""What the weights of a copy depend on, by which a resumed distillation is recognised."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from afterdrop.errors import DataError
from afterdrop.evaluation.output_summary import OutputSummary
from afterdrop.evaluation.request import Request
from afterdrop.family.member import Member


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a copy is trained, and on which distributions.

    Attributes:
        epochs: Passes over the data.
        lr: Learning rate at the beginning.
        seed: Of the order of the batches.
        member: The member that is learned.
        request: Its samples, and how data and outputs are read.
        fingerprint: Of the weights of the model.
    """

    epochs: int
    lr: float
    seed: int
    member: Member
    request: Request
    fingerprint: str

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise DataError(f"epochs={self.epochs} must be at least 1")
        if not self.lr > 0:
            raise DataError(f"lr={self.lr} must be above 0")
        if not -(2**63) <= self.seed < 2**63:
            raise DataError("seed must fit 64 bits; give a smaller integer")


@dataclasses.dataclass(frozen=True)
class StudentSettings:
    """What the weights of the copy depend on, apart from code and the content of the data.

    Attributes:
        schedule: How it is trained.
        trained: Names of the parameters that are trained.
        batches: Their number; 0 if it is not known.
    """

    schedule: Schedule
    trained: tuple[str, ...]
    batches: int


@dataclasses.dataclass(frozen=True)
class FirstBatch:
    """What stands for data and code: the first batch, and the predictions for it.

    Attributes:
        digest: Of its inputs, and of which of its targets count.
        outputs: Of the distributions to learn.
        fixed: Whether the data begin with the same batch each time.
        device: The kind of device that computed the outputs.
    """

    digest: str
    outputs: OutputSummary
    fixed: bool
    device: str


def first_difference(now: Any, then: Any) -> str:
    """The first field in which two unequal dataclasses of one type differ, with both values.

    Example:
        >>> first_difference(Member(1, 0.5), Member(1, 1.0))
        'multiplier was 1.0 and is 0.5'
    """
    names = [field.name for field in dataclasses.fields(now)]
    name = next(name for name in names if getattr(now, name) != getattr(then, name))
    here, there = getattr(now, name), getattr(then, name)
    if dataclasses.is_dataclass(here) and type(here) is type(there):
        return first_difference(here, there)
    return f"{name} was {there!r:.60} and is {here!r:.60}"


def has_fixed_order(batches: Iterable[Any]) -> bool:
    """Whether batches are known to begin with the same one each time: lists, and plain loaders.

    Example:
        >>> has_fixed_order([1, 2]), has_fixed_order(DataLoader([1, 2], shuffle=True))
        (True, False)
    """
    if not isinstance(batches, DataLoader):
        return isinstance(batches, Sequence)
    sampler = batches.batch_sampler
    return type(sampler) is BatchSampler and type(sampler.sampler) is SequentialSampler
