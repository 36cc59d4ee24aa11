"""The batches of an evaluation: read from what the user gives, on the model's device."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from afterdrop.errors import DataError
from afterdrop.evaluation.kept_items import copied
from afterdrop.evaluation.labelled_items import (
    TargetsPlace,
    shifts_labels,
    split_item,
    with_decoder_inputs,
)
from afterdrop.evaluation.likelihoods import Likelihood
from afterdrop.evaluation.likelihoods.categorical import Categorical
from afterdrop.evaluation.likelihoods.model_loss import shift_left
from afterdrop.evaluation.request import Request
from afterdrop.masks.model_call import check_inputs, is_movable, plain, take_rows, tensors
from afterdrop.masks.uniforms import site_key
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
        return digest_tensors([*there, self.host], plain_values(self.given))


@dataclasses.dataclass(frozen=True)
class Source:
    """How batches are made of what the user gives.

    Attributes:
        batch_size: Examples per batch, if single examples are given.
        collate: Makes a batch of a list of examples, or of whatever `batches` holds; for lists of
            `batch_size` examples by default that of torch's DataLoader.
        targets: The function that finds the targets in a batch, if the request has one.
    """

    batch_size: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    targets: TargetsPlace | None = None


AS_GIVEN = Source()


class BatchReader:
    """Reads the batches of a user: checks them, and moves them to the model's device.

    Args:
        model: The model, in eval mode while batches are read: its own loss says whether labels are
            shifted.
        likelihood: Reads the targets.
        request: Where the targets are, and how many of an example count.
        targets: The function that finds the targets in a batch, if the request has one.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        request: Request,
        targets: TargetsPlace | None = None,
    ) -> None:
        self.model, self.likelihood, self.request = model, likelihood, request
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._place = request.targets if targets is None else targets
        self._shifted: bool | None = None  # decided on the first batch with labels

    def read(self, item: Any, number: int, first: int) -> Batch:
        """One batch.

        Args:
            item: As the user gives it (`labelled_items`).
            number: Which batch, for messages.
            first: Number of its first example.
        """
        inputs, targets = split_item(item, self._place, number)
        if isinstance(targets, Tensor):
            targets = plain(targets)
        host = self.likelihood.read_targets(targets, number)
        check_inputs(inputs)
        if isinstance(inputs, list):
            inputs = tuple(inputs)
        moved = to_device(inputs, self.device)
        if isinstance(item, Mapping):
            moved = with_decoder_inputs(self.model, moved, host)
            if self._place is None and type(self.likelihood) is Categorical:
                host = self._as_in_the_loss(moved, host, self.likelihood)
        if self.request.targets_per_example is not None:
            host = self._sampled(host, first)
        return Batch(moved, to_device(host, self.device), first, len(host), inputs, host)

    def _as_in_the_loss(self, inputs: Any, labels: Tensor, likelihood: Categorical) -> Tensor:
        if self._shifted is None:
            fresh = take_rows(inputs, self.request.batch_dim, len(labels), 0, len(labels), 1)
            self._shifted = shifts_labels(self.model, fresh, labels, likelihood)
        return shift_left(labels, likelihood.ignore_index) if self._shifted else labels

    def _sampled(self, targets: Tensor, first: int) -> Tensor:
        """Targets of which some per example count; which ones depends on the seed and the example.

        Memory for results is bounded by them, however large an image is.
        """
        limit, seed = self.request.targets_per_example, self.request.plan.seed
        flat = targets.flatten(1) if targets.dim() > 1 else targets[:, None]
        counts = self.likelihood.counts(targets).view(flat.shape)
        kept = torch.full_like(flat, self.likelihood.ignored)
        for row in range(len(flat)):
            counting = counts[row].nonzero().squeeze(-1)
            generator = torch.Generator().manual_seed(site_key(seed, "targets", first + row))
            some = counting[torch.randperm(len(counting), generator=generator)[:limit]]
            kept[row, some] = flat[row, some]
        return kept.view(targets.shape)


def open_batches(
    batches: Iterable[Any],
    batch_size: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> tuple[Any, Iterator[Any], int | None]:
    """The first item, an iterator over all of them, and their number if it is known.

    Args:
        batches: Batches, or single examples if `batch_size` is given.
        batch_size: Examples per batch.
        collate: Makes a batch of a list of examples; by default that of torch's DataLoader.
    """
    total = _length(batches)
    if batch_size is not None:
        batches = _grouped(batches, batch_size)
        collate = default_collate if collate is None else collate
        total = None if total is None else -(-total // batch_size)
    elif isinstance(batches, Dataset) and not isinstance(batches, IterableDataset):
        raise DataError(
            f"batches is a dataset of single examples ({type(batches).__name__}); give "
            "batch_size= as well, or a DataLoader"
        )
    try:
        stream = iter(batches)
    except TypeError:
        loader = "; give its val_dataloader()" * hasattr(batches, "val_dataloader")
        raise DataError(
            f"batches is {type(batches).__name__}; give (inputs, targets) pairs, such as a loader"
            + loader
        ) from None
    if collate is not None:
        stream = map(collate, stream)
    try:
        head = next(stream)
    except StopIteration:
        raise DataError("batches is empty; give at least one (inputs, targets) pair") from None
    if isinstance(head, DataLoader):
        raise DataError("batches is a list of loaders; evaluate each of them on its own")
    return head, itertools.chain([head], stream), total


def _length(batches: Iterable[Any]) -> int | None:
    """How many items there are; None if that is not known."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a loader of a stream has the method, too
        return None


def _grouped(examples: Any, size: int) -> Iterator[list[Any]]:
    """Lists of `size` examples; the last may be shorter."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise DataError(f"batch_size={size!r} must be a positive number of examples")
    if isinstance(examples, DataLoader):
        raise DataError("batches is a DataLoader, which makes batches itself; omit batch_size")
    if isinstance(examples, Sized) and hasattr(examples, "__getitem__"):
        # Not by iteration: some datasets never raise the IndexError that would end it.
        examples = map(examples.__getitem__, range(len(examples)))
    else:
        examples = map(copied, examples)
    stream = iter(examples)
    return iter(lambda: list(itertools.islice(stream, size)), [])


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
        inputs = plain(inputs)
        return inputs if inputs.device == device else upload(inputs, device)
    if isinstance(inputs, Mapping):
        return {key: to_device(value, device) for key, value in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(to_device(value, device) for value in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(to_device(value, device) for value in inputs)
    return inputs.to(device) if is_movable(inputs) else inputs


def plain_values(inputs: Any) -> Iterator[bytes]:
    """What nested inputs hold beside tensors: text, numbers, arrays and images, in order.

    Example:
        >>> list(plain_values({"text": ["a", "b"], "scale": 2.0, "x": torch.ones(1)}))
        [b"'text'", b"'a'", b"'b'", b"'scale'", b'2.0', b"'x'"]
    """
    if is_movable(inputs):
        inputs = inputs.to_dict() if hasattr(inputs, "to_dict") else vars(inputs)
    if isinstance(inputs, str | bytes | bool | int | float | complex | None):
        yield repr(inputs).encode()
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from plain_values(key)
            yield from plain_values(value)
    elif isinstance(inputs, Sequence):
        for value in inputs:
            yield from plain_values(value)
    elif not isinstance(inputs, Tensor) and hasattr(inputs, "__array_interface__"):
        found = np.asarray(inputs)
        yield f"{found.shape} {found.dtype}".encode()
        yield repr(found.tolist()).encode() if found.dtype.hasobject else found.tobytes()


def digest_tensors(found: Iterable[Tensor], values: Iterable[bytes] = ()) -> str:
    """A hash of tensors: shapes, types and values; and of other values."""
    total = hashlib.blake2b(digest_size=12)
    for value in values:
        total.update(f"{len(value)} ".encode() + value)
    for tensor in found:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.detach().cpu().contiguous().flatten()
        total.update(data.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
