"""Items of a stream that are kept while it goes on: its loader may reuse one buffer for all."""

import copy
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from afterdrop.masks.model_call import is_movable


def copied(item: Any) -> Any:
    """An item with tensors and arrays of its own, as far as they are nested in plain containers.

    Example:
        >>> import torch
        >>> buffer = torch.zeros(2)
        >>> kept = copied((buffer, {"targets": np.ones(2)}, "name"))
        >>> buffer.fill_(5.0)
        tensor([5., 5.])
        >>> kept
        (tensor([0., 0.]), {'targets': array([1., 1.])}, 'name')
    """
    if isinstance(item, np.ndarray):
        return item.copy()
    if isinstance(item, Tensor):
        return item.clone()
    if isinstance(item, Mapping):
        found = {key: copied(value) for key, value in item.items()}
        if type(item) is dict or not isinstance(item, MutableMapping):
            return found
        own = copy.copy(item)
        own.update(found)
        return own
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(copied, item))
    if isinstance(item, list | tuple):
        return type(item)(map(copied, item))
    if is_movable(item) and callable(getattr(item, "clone", None)):
        return item.clone()  # graphs
    return item


def as_sequence(batches: Iterable[Any]) -> Sequence[Any]:
    """Batches that can be read several times: a sequence as it is, and copies of all others."""
    return batches if isinstance(batches, Sequence) else [copied(item) for item in batches]
