"""How work is cut into chunks."""

import itertools
import math


def split_evenly(total: int, limit: int) -> list[range]:
    """Consecutive ranges over `total` of nearly equal length, none longer than `limit`."""
    parts = max(1, math.ceil(total / max(1, limit)))
    edges = [round(i * total / parts) for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]
