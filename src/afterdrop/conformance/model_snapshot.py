"""Everything that using a model might change, by value: its tensors, attributes and generators."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afterdrop.evaluation.batches import digest_tensors

_DEEPEST = 6  # nested containers, which may contain themselves
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Values that can be compared, by name: of all modules, and of the global generators.

    Lists, dicts, arrays and random generators in attributes are compared by value, other objects
    by identity.

    Example:
        >>> model = nn.Dropout(0.5)
        >>> before = snapshot(model)
        >>> model.p, _ = 0.25, torch.rand(1)
        >>> differences(before, snapshot(model))
        ['p', "torch's generator"]
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            # What is registered has names of its own.
            entries = value if key in ("_parameters", "_buffers") else {key: value}
            for entry, tensor in entries.items():
                found[f"{name}.{entry}" if name else entry] = _value(tensor)
    return found | generators()


def generators() -> dict[str, Any]:
    """The states of the global random generators, by name."""
    found: dict[str, Any] = {}
    found["torch's generator"] = digest_tensors([torch.get_rng_state()])
    if torch.cuda.is_initialized():
        found["CUDA's generators"] = digest_tensors(torch.cuda.get_rng_state_all())
    found["Python's generator"] = random.getstate()
    found["NumPy's generator"] = _value(np.random.get_state())
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs, in order."""
    missing = object()
    names = dict.fromkeys([*before, *after])
    return [n for n in names if before.get(n, missing) != after.get(n, missing)]


def _value(value: Any, depth: int = 0) -> Any:
    """Something that is equal as long as the value is."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)  # a NaN differs from itself, its text does not
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return digest_tensors([value.get_state()])
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _value(value.get_state())
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {_value(k): _value(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple | deque):
            return type(value).__name__, [_value(entry, depth + 1) for entry in value]
        if isinstance(value, set | frozenset):
            return {_value(entry) for entry in value}
    return id(value)


def _tensor(tensor: Tensor) -> Any:
    """A hash of the values, and the other things that a pass might change."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return id(tensor), tensor._version
    grad = tensor.grad if tensor.is_leaf else None
    return (
        str(tensor.device),
        tensor.requires_grad,
        digest_tensors([tensor]),
        None if grad is None else digest_tensors([grad]),
    )
