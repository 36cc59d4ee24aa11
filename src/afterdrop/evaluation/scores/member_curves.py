"""The curve of a member over temperatures, from the tensors of Scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afterdrop.errors import ScoresError
from afterdrop.evaluation.scores import schema
from afterdrop.evaluation.scores.curves import MeanCurve, SampleCurve
from afterdrop.evaluation.scores.density_curve import DensityCurve
from afterdrop.evaluation.scores.schema import Group
from afterdrop.family.member import Member

if TYPE_CHECKING:
    from afterdrop.evaluation.scores.scores import Scores


def mean_curve(scores: Scores, group: Group, at: Any, samples: int) -> MeanCurve:
    """Of temperatures that act on the mean."""
    names = ("target", "peak", "class", "partition", "one", "two", "entropy")
    target, peak, top, partition, one, two, entropy = (
        scores.field(group, name)[at] for name in names
    )
    half = scores.field(group, "half")[at] if scores.has(group, "half") else None
    nodes = scores.protocol.nodes
    return MeanCurve(target, peak, top, partition, one, two, entropy, half, nodes, samples)


def check_temper(scores: Scores, member: Member) -> None:
    """Refuses a temper that was not evaluated: of numbers, one is.

    A noise variance is always that of each sample, whatever the member says.
    """
    kept = scores.protocol.grid.temper
    if member.alpha > 0 and member.temper != kept and scores.request.likelihood != "squared_error":
        raise ScoresError(
            f"{member!r} was evaluated with temper={kept!r}; evaluate with Grid(..., "
            f"temper={member.temper!r})"
        )


def density_curve(scores: Scores, member: Member) -> DensityCurve:
    """Of numbers."""
    noise = scores.request.likelihood == "squared_error"
    if member.deterministic:
        group: Group = "deterministic"
        at: Any = ...
        samples = 0
    else:
        group, at, samples = "sampled", scores.index(member), scores.num_samples
    names = {spec.field for spec in schema.DENSITY if spec.group == "quantile"}
    fields = {name: scores.field(group, name)[at] for name in names}
    half = scores.field(group, "nll_half")[at] if scores.has(group, "nll_half") else None
    return DensityCurve(fields, half, scores.density_nodes, not noise, samples)


def sample_curve(scores: Scores, member: Member) -> SampleCurve:
    """Of temperatures that act on each sample, or on each component of a mixture."""
    if scores.protocol.grid.temper != member.temper:
        what = "samples" if member.temper == "sample" else "components"
        raise ScoresError(
            f"{member!r} needs tempered {what}; evaluate with Grid(..., temper={member.temper!r})"
        )
    group: Group = "tempered_deterministic" if member.deterministic else "tempered"
    at: Any = ... if member.deterministic else scores.tempered_index(member)
    names = ("xe", "peak", "class", "square", "entropy")
    xe, peak, top, square, entropy = (scores.field(group, name)[at] for name in names)
    half = scores.field(group, "half")[at] if scores.has(group, "half") else None
    nodes, samples = scores.protocol.sample_nodes, scores.num_samples
    samples = 0 if member.deterministic else samples
    return SampleCurve(xe, peak, top, square, entropy, half, nodes, samples)
