"""Proposes the next point: a pure function of the settings and of the points tried so far."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from afterdrop.tune.observed_points import Seen, known_values
from afterdrop.tune.optuna_backend import gp_point
from afterdrop.tune.search_space import Point, own_point
from afterdrop.tune.study_settings import TuneSettings


def propose(settings: TuneSettings, seen: Sequence[Seen]) -> Point:
    """The next point to try.

    The first point is that of the unmodified configuration if it lies in the space. With the
    sampler `"gp"`, points of a Sobol sequence follow until there is one more point than axes, and
    then the Gaussian process proposes. A failed point counts like the worst known value, so that it
    is not tried again.

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


def _seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
