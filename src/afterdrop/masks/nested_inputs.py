"""Nested inputs (tuples, lists and mappings of tensors): their batch size and copies of rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from afterdrop.errors import DataError


def batch_size(inputs: Any, batch_dim: int) -> int:
    """The size of the batch dimension of the first tensor in nested inputs."""
    for tensor in tensors(inputs):
        if tensor.dim() > batch_dim:
            return tensor.shape[batch_dim]
    raise DataError(
        f"no input tensor has a dimension batch_dim={batch_dim}; pass tensors (or tuples or dicts "
        "of tensors) with a batch dimension, and its index as batch_dim"
    )


def tensors(inputs: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and mappings, in order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, Mapping):
        return [tensor for value in inputs.values() for tensor in tensors(value)]
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return [tensor for value in inputs for tensor in tensors(value)]
    return []


def take_rows(inputs: Any, batch_dim: int, batch: int, start: int, stop: int, copies: int) -> Any:
    """Copies the examples start:stop of nested inputs.

    Args:
        inputs: Tensors whose dimension `batch_dim` has size `batch` are copied; everything else is
            returned as it is.
        batch_dim: The batch dimension.
        batch: The batch size.
        start: The first example.
        stop: The end of the examples.
        copies: How often the examples are repeated, one copy of all of them after the other.

    Example:
        >>> import torch
        >>> take_rows({"x": torch.tensor([5, 6, 7]), "scale": 2.0}, 0, 3, 0, 2, copies=2)
        {'x': tensor([5, 6, 5, 6]), 'scale': 2.0}
    """
    if isinstance(inputs, Tensor):
        if inputs.dim() <= batch_dim or inputs.shape[batch_dim] != batch:
            return inputs
        part = inputs.narrow(batch_dim, start, stop - start)
        if copies == 1:
            return part.clone()  # the model may write into its input
        times = [1] * part.dim()
        times[batch_dim] = copies
        return part.repeat(times)
    if isinstance(inputs, Mapping):
        return {k: take_rows(v, batch_dim, batch, start, stop, copies) for k, v in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):
        return type(inputs)(*(take_rows(v, batch_dim, batch, start, stop, copies) for v in inputs))
    if isinstance(inputs, list | tuple):
        return type(inputs)(take_rows(v, batch_dim, batch, start, stop, copies) for v in inputs)
    return inputs
