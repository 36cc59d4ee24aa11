"""Bounds and gaps of a member from Scores (the maths is in `family.bounds`)."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from afterdrop.errors import ScoresError
from afterdrop.evaluation.scores.curves import within
from afterdrop.evaluation.scores.density_curve import interpolated
from afterdrop.family.bounds import Bounds, jensen_bounds, variance_of_probability
from afterdrop.family.member import Member

if TYPE_CHECKING:
    from afterdrop.evaluation.scores.scores import Scores


def member_bounds(scores: Scores, member: Member) -> Bounds:
    """Means over targets of the bound, the objective and the gaps of one member."""
    if member.deterministic:
        values = scores.values(member).whole
        objective, p = -values.mean().item(), (-values).exp().mean().item()
        return Bounds(objective, objective, 0.0, 0.0, 0.0, p, 0.0, 0.0, 0.0, 0.0)
    row, column = scores.index(member)
    if not scores.has("sampled", "bound"):
        return _at_nodes(scores, member, row, column)
    if member.temperature != 1:
        if not scores.protocol.has_classes and scores.has("sampled", "bound_at"):
            return _at_nodes(scores, member, row, column)
        return _tempered(scores, member, row)
    get = partial(scores.field, "sampled")
    target, bound = get("target")[row, column], get("bound")[row]
    approximation, lower, upper = jensen_bounds(
        member.alpha,
        target,
        get("second")[row, column],
        get("lowest")[row],
        get("highest")[row],
    )
    log_z = get("one")[row, column]
    log_z = log_z.masked_fill(log_z.isnan(), -math.inf)  # no class has any probability
    variance = variance_of_probability(get("mean")[row], get("square")[row])
    return Bounds(
        objective=_minus(target, log_z, -math.inf).mean().item(),
        bound=bound.mean().item(),
        jensen_gap=_minus(target, bound, 0.0).mean().item(),
        normaliser_gap=-log_z.mean().item(),
        variance=variance.mean().item(),
        mean_probability=get("mean")[row].exp().mean().item(),
        jensen_approximation=approximation.mean().item(),
        jensen_lower=lower.mean().item(),
        jensen_upper=upper.mean().item(),
        normaliser_approximation=(1 - member.alpha) / 2 * get("spread")[row].mean().item(),
    )


def sample_log_likelihoods(scores: Scores, row: int) -> Tensor:
    """[N] mean_k log p_k(y) at T = 1, of the samples at one multiplier: the bound per target."""
    if scores.has("sampled", "bound"):
        return scores.field("sampled", "bound")[row]
    return interpolated(scores.field("sampled", "bound_at")[row], 1.0, scores.density_nodes)


def _minus(first: Tensor, second: Tensor, if_both_infinite: float) -> Tensor:
    """The difference, where −inf − (−inf) is given.

    Samples that all call a target impossible have no Jensen gap, and a distribution without any
    probability (log Z = −inf) has an objective of −inf.
    """
    difference = first - second
    return difference.masked_fill(difference.isnan(), if_both_infinite)


def _at_nodes(scores: Scores, member: Member, row: int, column: int) -> Bounds:
    """Of numbers: D_T = mean_k log p_k(y) of samples that are tempered, or have a noise variance.

    Variance and approximations are not kept there: NaN.
    """
    objective = -scores.values(member).whole
    nodes = scores.density_nodes
    bound = interpolated(scores.field("sampled", "bound_at")[row], member.temperature, nodes)
    log_z = scores.field("sampled", "log_z_at")[row, column]
    log_z = interpolated(log_z, member.temperature, nodes)
    gaps = (objective + log_z - bound).mean().item(), 0.0 - log_z.mean().item()
    return Bounds(objective.mean().item(), bound.mean().item(), *gaps, *([math.nan] * 6))


def _tempered(scores: Scores, member: Member, row: int) -> Bounds:
    """At T ≠ 1: D_T = mean_k log softmax(l_k/T)(y), where the samples themselves were tempered.

    Where their components were, it is the mean log-probability of samples with these components.
    Variance and approximations were not kept for tempered samples: NaN.
    """
    if member.temper == "mean" and member.alpha > 0:
        raise ScoresError(
            f"{member!r} has no decomposition into a bound and gaps: its temperature acts on "
            "the mean; ask at temperature 1 or with temper='sample'"
        )
    needed = "component" if member.temper == "component" else "sample"
    if not scores.has("tempered") or scores.protocol.grid.temper != needed:
        raise ScoresError(
            f"the bound at a temperature other than 1 needs tempered {needed}s; evaluate with "
            f"grid=Grid(..., temper={needed!r})"
        )
    nodes = scores.protocol.sample_nodes
    weights = nodes.weights(within(member.temperature, nodes))
    bound = weights @ scores.field("tempered", "bound")[row]
    objective = -scores.values(member).whole
    if member.alpha == 0:  # the mean of logs is the bound itself: no Jensen gap
        log_z = bound - objective
    else:
        log_z = weights @ scores.field("tempered", "log_z")[scores.tempered_index(member)]
    gaps = (objective + log_z - bound).mean().item(), -log_z.mean().item()
    return Bounds(objective.mean().item(), bound.mean().item(), *gaps, *([math.nan] * 6))
