"""The entries of thousands of dicts, kept to see which dicts change.

A copy of each dict would be simpler, but a model has several dicts per module, and Python's garbage
collector looks at every copy again and again: longer than a pass of a model with thousands of
modules takes. Dicts of the same class of module have the same names, which are kept once, and the
values of all dicts are in one list.
"""

import operator
from collections.abc import Iterable, Iterator
from typing import Any


class IdentitySnapshot:
    """The entries that dicts have now.

    Args:
        dicts: The dicts, always in the same order.

    Example:
        >>> modes, counts = {"training": True}, {"calls": 0}
        >>> snapshot = IdentitySnapshot([modes, counts])
        >>> counts["calls"] += 1
        >>> list(snapshot.changed([modes, counts]))
        [(1, {'calls': 0})]
    """

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        known: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._names: list[tuple[str, ...]] = []
        self._values: list[Any] = []
        for each in dicts:
            names = tuple(each)
            self._names.append(known.setdefault(names, names))
            self._values.extend(each.values())

    def changed(self, dicts: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The dicts that no longer have the same objects in the same order.

        Args:
            dicts: The dicts, as they are now.

        Yields:
            The number of a dict, and the entries that it had.
        """
        stop = 0
        for number, (now, names) in enumerate(zip(dicts, self._names)):
            start, stop = stop, stop + len(names)
            if not (now or names):
                continue
            values = self._values[start:stop]
            if tuple(now) != names or not all(map(operator.is_, now.values(), values)):
                yield number, dict(zip(names, values))
