"""The batches of an evaluation: read from what the user gives, on the model's device."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from afterdrop.errors import DataError
from afterdrop.evaluation.likelihoods import Likelihood
from afterdrop.masks.model_call import check_inputs, take_rows, tensors
from afterdrop.transfer import upload


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs and targets of some examples.

    Attributes:
        inputs: Nested inputs, on the model's device.
        targets: [B, ...] with the batch dimension first, on the model's device.
        first: Number of the first example in the data.
        size: B.
        given: The inputs as they were given.
        host: The targets on the CPU, which can be read without waiting for a device.
    """

    inputs: Any
    targets: Tensor
    first: int
    size: int
    given: Any
    host: Tensor

    def fresh_inputs(self, batch_dim: int) -> Any:
        """A copy of the inputs: a model may write into what it is given."""
        return take_rows(self.inputs, batch_dim, self.size, 0, self.size, 1)

    def digest(self) -> str:
        """A hash of inputs and targets."""
        given = tensors(self.given)
        # States that a model carried there lie on its device, where reading them would wait for
        # the batches under way; they follow from the tokens of the batches before.
        there = [tensor for tensor in given if tensor.device.type == "cpu"] or given
        return digest_tensors([*there, self.host])


def read_batch(
    item: Any, number: int, first: int, device: torch.device, likelihood: Likelihood
) -> Batch:
    """Checks one item of the user's batches and moves it to a device.

    Args:
        item: A pair (inputs, targets).
        number: Which batch, for messages.
        first: Number of its first example.
        device: Where the model is.
        likelihood: Reads the targets.
    """
    if not isinstance(item, list | tuple) or len(item) != 2:
        raise DataError(
            f"batch {number} is {type(item).__name__}, not a pair (inputs, targets); wrap your "
            "data so that each batch is such a pair"
        )
    inputs, targets = item
    host = likelihood.read_targets(targets, number)
    check_inputs(inputs)
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    moved = to_device(inputs, device)
    return Batch(moved, to_device(host, device), first, len(host), inputs, host)


def open_batches(batches: Iterable[Any]) -> tuple[Any, Iterator[Any], int | None]:
    """The first item, an iterator over all of them, and their number if it is known."""
    total = len(batches) if isinstance(batches, Sized) else None
    try:
        stream = iter(batches)
    except TypeError:
        raise DataError(
            f"batches is {type(batches).__name__}; give (inputs, targets) pairs, such as a loader"
        ) from None
    try:
        head = next(stream)
    except StopIteration:
        raise DataError("batches is empty; give at least one (inputs, targets) pair") from None
    return head, itertools.chain([head], stream), total


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls a model with a tensor, a tuple of positional or a mapping of keyword inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def to_device(inputs: Any, device: torch.device) -> Any:
    """Moves the tensors of nested inputs."""
    if isinstance(inputs, Tensor):
        return inputs if inputs.device == device else upload(inputs, device)
    if isinstance(inputs, Mapping):
        return {key: to_device(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(to_device(value, device) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(to_device(value, device) for value in inputs)
    return inputs


def digest_tensors(found: Iterable[Tensor]) -> str:
    """A hash of tensors: shapes, types and values."""
    total = hashlib.blake2b(digest_size=12)
    for tensor in found:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.detach().cpu().contiguous().flatten()
        total.update(data.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
