"""Contents of the containers and small tensors that modules hold as plain attributes.

A forward pass may count in a dict, append to a list or add to a tensor that is not a buffer. The
attribute then still refers to the same object, so that putting attributes back does not undo it.
These objects are given their contents back in place: whatever else refers to them sees it too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES = frozenset({list, deque})
_KINDS = _MAPPINGS | _SEQUENCES | {set, tuple, Tensor}  # other objects may not take them back
_DEEPEST = 4  # nested containers, which may contain themselves
_LARGEST = 2**20  # bytes of a tensor: counters and statistics, not data that a module refers to
_OF_TORCH = frozenset(nn.Module().__dict__)  # hooks and registered objects
_PLAIN = (bool, int, float, str)  # compared by value; other objects by identity


class Contents:
    """What containers and small tensors in attributes hold now, to be compared and restored.

    Args:
        attributes: The attributes of each module, by name.

    Example:
        >>> state = {"calls": 0, "seen": [1]}
        >>> contents = Contents([{"state": state}])
        >>> state["calls"] += 1
        >>> state["seen"].append(2)
        >>> contents.changed()
        {0: {'state'}}
        >>> contents.restore()
        >>> state
        {'calls': 0, 'seen': [1]}
    """

    def __init__(self, attributes: Iterable[Mapping[str, Any]]) -> None:
        self._held: dict[int, tuple[Any, Any]] = {}  # by identity: the object and its contents
        # By number of the module: the attribute, and what it reaches.
        self._inside: dict[int, list[tuple[str, list[int]]]] = {}
        known: dict[int, list[int]] = {}  # modules may share an object
        for number, names in enumerate(attributes):
            for name, value in names.items():
                if type(value) in _KINDS and name not in _OF_TORCH:
                    if id(value) not in known:
                        known[id(value)] = list(self._keep(value, 0))
                    if known[id(value)]:
                        self._inside.setdefault(number, []).append((name, known[id(value)]))

    def changed(self) -> dict[int, set[str]]:
        """Numbers of the modules whose contents differ by now, with the names of the attributes."""
        found: dict[int, set[str]] = {}
        for number, entries in self._inside.items():
            for name, inside in entries:
                if any(not _unchanged(*self._held[key]) for key in inside):
                    found.setdefault(number, set()).add(name)
        return found

    def restore(self) -> None:
        """Gives every object its contents back."""
        for key, (value, contents) in self._held.items():
            if not _unchanged(value, contents):
                self._held[key] = value, _fill(value, contents)

    def _keep(self, value: Any, depth: int) -> Iterator[int]:
        """Keeps the contents of an object and of those inside it; their identities."""
        kind = type(value)
        if kind not in _KINDS or depth > _DEEPEST:
            return
        if id(value) in self._held:
            yield id(value)
        elif kind is not Tensor:
            if kind is not tuple:
                self._held[id(value)] = value, _copied(value)
                yield id(value)
            for entry in tuple(value.values() if kind in _MAPPINGS else value):
                yield from self._keep(entry, depth + 1)
        elif _is_small(value):
            self._held[id(value)] = value, (value._version, value.detach().clone())
            yield id(value)


def differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> set[str]:
    """Names whose values are not the same.

    Example:
        >>> sorted(differing({"a": 1, "b": 2}, {"a": 1.0, "b": 2, "c": 3}))
        ['a', 'c']
    """
    missing = object()
    return {
        name
        for name in now.keys() | before.keys()
        if not same(now.get(name, missing), before.get(name, missing))
    }


def same(value: object, other: object) -> bool:
    """Whether two attributes are the same object, or equal numbers or texts.

    Example:
        >>> same((1, "a"), (1, "a")), same([], []), same(1, 1.0)
        (True, False, False)
    """
    if value is other:
        return True
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and isinstance(value, _PLAIN) and value == other


def _is_small(tensor: Tensor) -> bool:
    """Whether a tensor is copied: small, and of a form that takes its values back."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_inference():
        return False
    return tensor.nbytes <= _LARGEST and (0 not in tensor.stride() or tensor.numel() < 2)


def _copied(container: Any) -> Any:
    """The contents of a container: the entries of a mapping in their order."""
    if type(container) in _MAPPINGS:
        return list(container.items())
    return set(container) if type(container) is set else list(container)


def _unchanged(value: Any, contents: Any) -> bool:
    """Whether an object holds what it held; tensors count how often they were written to."""
    if type(value) is Tensor:
        return bool(value._version == contents[0])
    if len(value) != len(contents):
        return False
    if type(value) is set:
        return bool(value == contents)
    return all(map(same, _copied(value), contents))


def _fill(value: Any, contents: Any) -> Any:
    """Gives an object its contents back; returns them, as they are kept from now on."""
    if type(value) is Tensor:
        with torch.no_grad():
            value.copy_(contents[1])
        return value._version, contents[1]
    value.clear()
    if type(value) in _MAPPINGS:
        for key, entry in contents:
            value[key] = entry
    elif type(value) is set:
        value.update(contents)
    else:
        value.extend(contents)
    return contents
