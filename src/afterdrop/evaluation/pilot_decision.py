"""What a pilot decides about the rest of an evaluation: which multipliers, with how many samples.

Legend: K samples of the main evaluation, K0 of the pilot; x(λ) the lowest XE of multiplier λ over
alphas and temperatures, at the predictor's number of samples, which extrapolates the bias c/K.

    tolerance   `mask_share` times the standard error of the leader's XE over the data. A loss far
                below that error cannot be seen, so neither masks nor gaps between multipliers need
                to cause less.
    beaten      a multiplier of which every candidate (alpha, T = 1 or fitted) is worse than the
                leader by `beaten_by` standard errors of their paired difference
    thinned     x(λ) is smooth, about a parabola: midway between two multipliers h apart it dips by
                x″h²/8. Of the multipliers that are not beaten only as many are kept as it takes for
                that to stay within the tolerance. Few multipliers with many samples choose better
                than many with few: noise has fewer chances to win. The outermost ones stay, and
                no gap exceeds half of their distance. Where that needs too many passes, gaps widen
                until three multipliers are left, or the leader and the vertex below.
    refined     where the vertex of the parabola through what is left lies lower than all that is
                kept by more than the tolerance, it is evaluated as well, on the grid or not
    reference   multiplier 1 stays, beaten or not: plain Monte Carlo dropout (AMC, GMC) is what
                everything is compared with
    K           the mask error of the paired differences falls about as 1/√K, with Latin hypercubes
                faster. K makes it as small as the tolerance, but pilot and main evaluation together
                take no more passes than one multiplier with the predictor's samples would. All
                multipliers share K, because differences between them are paired in the masks, too,
                and only at the same K.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from afterdrop.evaluation.request import Adaptive
from afterdrop.evaluation.scores.scores import Scores
from afterdrop.family.estimates import Estimate, Values, clustered_error, estimate
from afterdrop.masks.uniforms import Plan

_FEWEST = 3  # multipliers to which what is left may be thinned for the sake of passes
_FEWEST_SAMPLES = 4  # of a pilot: two in each half
_REFERENCE = 1.0  # the multiplier of plain Monte Carlo dropout


@dataclasses.dataclass(frozen=True)
class Decision:
    """What the main evaluation runs.

    Attributes:
        multipliers: In ascending order, 0 among them.
        num_samples: K.
    """

    multipliers: tuple[float, ...]
    num_samples: int


def decide(pilot: Scores, settings: Adaptive, share: float) -> Decision:
    """Which multipliers the main evaluation runs, and with how many samples.

    Args:
        pilot: Scores of part of the data, with all multipliers.
        settings: The rules.
        share: How much of the data the pilot has seen.
    """
    plan, everything = pilot.protocol.plan, (0.0, *pilot.protocol.grid.stochastic)
    found = {m: _candidates(pilot, m, settings.samples) for m in everything}
    lowest = {m: min(_mean(v) for v in values) for m, values in found.items()}
    leader = min(lowest, key=lowest.__getitem__)
    best = min(found[leader], key=_mean)
    error = clustered_error(best.whole, pilot.clusters)
    if not (math.isfinite(lowest[leader]) and error > 0):  # too little data to decide anything
        return Decision(everything, settings.samples)
    against = {m: [_estimate(pilot, v.minus(best)) for v in found[m]] for m in everything}
    left = [m for m in everything if not _beaten(against[m], settings.beaten_by)]
    masks = {m: min(against[m], key=lambda e: e.value).mc_error for m in everything}
    tolerance = settings.mask_share * error
    dip = tolerance * math.sqrt(share)  # that of all data
    passes = settings.samples - share * plan.num_samples * (len(everything) - 1)
    bend, vertex = _parabola(left, lowest)
    spacing = (left[-1] - left[0]) / 2  # whatever the parabola says: it may be noise
    if bend > 0:
        spacing = min(spacing, 2 * math.sqrt(dip / bend))
    while True:
        kept = _thinned(left, leader, spacing)
        if bend > 0 and min(bend * (vertex - m) ** 2 for m in kept) > dip:
            kept.append(round(vertex, 2))
        if not any(kept):  # beside the deterministic member, the best that samples
            kept.append(min(everything[1:], key=lowest.__getitem__))
        needed = settings.samples  # shared masks show a single draw of the error
        errors = [masks[m] for m in kept if m in masks]
        if not pilot.protocol.shared and all(map(math.isfinite, errors)):
            needed = math.ceil(plan.num_samples * (max(errors) / tolerance) ** 2)
        needed = sample_count(plan, needed, settings)
        evaluated = {0.0, *kept, *(m for m in everything if m == _REFERENCE)}
        count = len(evaluated) - 1
        if sum(m > 0 for m in kept) <= _FEWEST or count * needed <= passes or spacing == math.inf:
            break
        wider = 1.25 * max(spacing, everything[1])
        spacing = wider if spacing <= left[-1] - left[0] else math.inf
    affordable = _step(plan) * math.floor(passes / count / _step(plan))
    samples = sample_count(plan, min(needed, affordable), settings)
    return Decision(tuple(sorted(evaluated)), samples)


def pilot_samples(plan: Plan, settings: Adaptive, share: float) -> int:
    """Samples of the pilot: fewer where a few large batches make it see more of the data.

    Example:
        >>> [pilot_samples(Plan(100), Adaptive(), share) for share in (0.1, 0.125, 0.25, 1)]
        [16, 16, 8, 4]
    """
    wanted = settings.pilot_samples * min(1.0, settings.pilot_share / share)
    step = _step(plan)
    return step * math.ceil(max(wanted, _FEWEST_SAMPLES) / step)


def _step(plan: Plan) -> int:
    """What a number of samples has to be a multiple of."""
    return plan.blocks * (2 if plan.scheme == "antithetic" else 1)


def sample_count(plan: Plan, samples: int, settings: Adaptive) -> int:
    """The next number of samples that a plan admits, from the fewest to the predictor's."""
    step = _step(plan)
    within = min(max(samples, settings.pilot_samples), settings.samples)
    return step * math.ceil(within / step)


def _candidates(pilot: Scores, multiplier: float, k: int) -> list[Values]:
    """Every alpha at T = 1 and at its best temperature, at `k` samples."""
    members = [m for m in pilot.members if m.multiplier == multiplier]
    both = [at for m in members for at in (m, pilot.fit(m, k).member)]
    return [pilot.values(member).moved(k) for member in both]


def _mean(values: Values) -> float:
    """Mean XE; infinite where a target, or the mean itself, is impossible."""
    mean = values.whole.mean().item()
    return math.inf if math.isnan(mean) else mean


def _estimate(pilot: Scores, values: Values) -> Estimate:
    return estimate(values, pilot.clusters, shared=pilot.protocol.shared)


def _beaten(differences: list[Estimate], by: float) -> bool:
    """Whether all candidates are worse than the leader; one that is impossible is."""
    return all(not d.value < math.inf or d.value > by * d.error for d in differences)


def _parabola(left: list[float], lowest: dict[float, float]) -> tuple[float, float]:
    """Half the second derivative and the vertex of the parabola through what is left.

    The first is 0 where there is no parabola, or none that opens upwards with its vertex inside.

    Example:
        >>> [round(v, 6) for v in _parabola([0.0, 0.5, 1.0], {0.0: 0.36, 0.5: 0.01, 1.0: 0.16})]
        [1.0, 0.6]
    """
    if len(left) < 3:
        return 0.0, 0.0
    at = torch.tensor(left, dtype=torch.float64)
    xe = torch.tensor([lowest[m] for m in left], dtype=torch.float64)
    powers = torch.stack([at**0, at, at**2], -1)
    _, slope, bend = torch.linalg.lstsq(powers, xe.unsqueeze(-1)).solution.flatten().tolist()
    vertex = -slope / (2 * bend) if bend > 0 else 0.0
    return (bend, vertex) if left[0] < vertex < left[-1] else (0.0, 0.0)


def _thinned(left: list[float], leader: float, spacing: float) -> list[float]:
    """The leader, the outermost of what is left on either side, and those needed in between.

    Example:
        >>> _thinned([0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 0.4, 0.2)
        [0.4, 0.2, 0.6, 0.7]
    """
    kept = [leader]
    for side in ([m for m in reversed(left) if m < leader], [m for m in left if m > leader]):
        last = leader
        for here, after in zip(side, [*side[1:], math.inf]):
            if abs(after - last) > spacing * (1 + 1e-9):
                kept.append(here)
                last = here
    return kept
