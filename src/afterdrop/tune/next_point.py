"""Which point comes next: a pure function of the settings and of what the trials say so far."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from afterdrop.tune.optuna_backend import gp_point
from afterdrop.tune.search_space import Point, own_point
from afterdrop.tune.study_settings import TuneSettings

Standing = Literal["known", "bad", "pending"]
# Values further above the median than this many times its distance to the best are cut there. They
# say that a point is bad; how bad (a perplexity of thousands) would flatten all else.
_CUT = 3.0


class Seen(NamedTuple):
    """A point that was given out before.

    Attributes:
        point: The point.
        standing: `"known"` with a value, `"bad"` if its training failed, or `"pending"`.
        value: Its value, if known.
    """

    point: Point
    standing: Standing
    value: float | None = None


def propose(settings: TuneSettings, seen: Sequence[Seen]) -> Point:
    """The next point to try.

    The first is the configuration's own, where the space has it. Then, with the sampler `"gp"`,
    points of a Sobol sequence until there is one more than axes; then the Gaussian process. Points
    whose training failed count as bad as the worst known, so that they are not tried again.

    Example:
        >>> from afterdrop.tune.study_settings import plan_study
        >>> propose(plan_study("digits-mlp"), [])["optimiser.learning_rate"]
        0.001
    """
    space, number = settings.space, len(seen)
    own = own_point(settings.config, space) if settings.own_first else None
    if number == 0 and own is not None:
        return own
    if settings.sampler == "random":
        generator = torch.Generator().manual_seed(_seed(settings.seed, number))
        return space.point(torch.rand(len(space), generator=generator).tolist())
    known = known_values(seen)
    if number <= len(space) or len(known) < 2:
        engine = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=settings.seed)
        engine.fast_forward(number)
        return space.point(engine.draw(1, dtype=torch.float64)[0].tolist())
    pending = [s.point for s in seen if s.standing == "pending"]
    return gp_point(space, known, pending, _seed(settings.seed, number) % 2**32)


def cut_of(values: Sequence[float]) -> float:
    """The value above which a value only says that a point is bad.

    Example:
        >>> cut_of([1.0, 2.0, 3.0, 900.0])
        7.0
    """
    middle = statistics.median(values)
    return min(max(values), middle + _CUT * (middle - min(values)))


def known_values(seen: Sequence[Seen]) -> list[tuple[Point, float]]:
    """Points with values fit for a Gaussian process: outliers cut, failures as the worst.

    Example:
        >>> values = [1.0, 2.0, 3.0, 900.0]
        >>> rows = [Seen({}, "known", value) for value in values] + [Seen({}, "bad")]
        >>> [value for _, value in known_values(rows)]
        [1.0, 2.0, 3.0, 7.0, 7.0]
    """
    values = [s.value for s in seen if s.value is not None]
    if not values:
        return []
    cut = cut_of(values)
    return [
        (s.point, cut if s.value is None else min(s.value, cut))
        for s in seen
        if s.standing != "pending"
    ]


def _seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
